"""The device for the trials of a search, if any run: `--mode` and `--memory-limit`."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.app.device import CPU, LocalGpu, is_cpu, local_gpus, no_gpu
from tuner.core import host
from tuner.core.environment import trial_environment
from tuner.core.errors import InputError, UnavailableError
from tuner.core.records import Configuration, Outcome, Prediction
from tuner.core.units import GIB, format_gib
from tuner.emulator.build import unavailable
from tuner.emulator.here import is_emulated
from tuner.predict.stages import hardest_first
from tuner.searches.joining import checked_address
from tuner.searches.nodes import Need
from tuner.searches.options import Mode, SearchOptions
from tuner.searches.request import TrialDevice
from tuner.space import SearchSpace
from tuner.space.gpus import LIMIT_OF_TYPE, Gpu, not_predicted
from tuner.trial import base
from tuner.trial.factories import EmulatedFactory, VerifiedFactory
from tuner.trial.isolated import IsolatedRunner
from tuner.trial.staged import StagedRunner

SMALLER = 0.95
"""Memory below this share of the device's is a different size, not a driver difference."""


def labels_of(options: SearchOptions) -> dict[str, str]:
    """The labels of a cluster's nodes; empty without one. Raises `InputError` for wrong ones."""
    labels = options.labels if options.address is not None else ()
    pairs = [label.partition("=") for label in labels]
    if wrong := [key + middle + value for key, middle, value in pairs if not (key and value)]:
        raise InputError(f"--label {wrong[0]!r} is no KEY=VALUE", hint="write team=vision")
    return {key: value for key, _, value in pairs}


@dataclass(frozen=True, slots=True)
class Predicting:
    """No trial runs and everything is predicted; `why` is the reason."""

    why: str


@dataclass(frozen=True, slots=True)
class Measuring:
    """Trials run for real on `device` ("cuda:0" or "cpu", as a trial's process sees it).

    `names` and `sizes_bytes` are the exact names and memory sizes that the device may have.
    `stands_in` means that it is a larger GPU than the requested type. `local` are the indices of
    GPUs of this machine; empty for a processor or a cluster. `awaited` means that the cluster
    still has to start a node with such a GPU. `emulated` means that the device is not present:
    each trial gets `gpus` emulated ones.
    """

    device: str
    names: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    resources: Mapping[str, float]
    local: tuple[int, ...] = ()
    memory_limit_bytes: int | None = None
    stands_in: bool = False
    awaited: bool = False
    emulated: bool = False
    gpus: int = 1

    @property
    def threads(self) -> int:
        """Threads that a trial computes with: one for each of its processors."""
        return max(1, int(self.resources.get("CPU", 1)))

    @property
    def trial_device(self) -> TrialDevice:
        """The device of the trials, as recorded."""
        return TrialDevice(self.names[0], self.memory_limit_bytes, self.emulated)

    def options(self, **values: object) -> base.MeasureOptions:
        """The options for running one trial."""
        given = {name: value for name, value in values.items() if value is not None}
        return base.MeasureOptions(
            device=self.device,
            memory_limit_bytes=self.memory_limit_bytes,
            **given,  # type: ignore[arg-type]
        )

    def factory(self, job: base.TrialJob, options: base.MeasureOptions) -> base.RunnerFactory:
        """The factory that makes runners in the workers, after checking the worker's GPU."""
        if self.emulated and "GPU" not in self.resources:
            return EmulatedFactory(job, options, self.gpus)
        make = functools.partial(IsolatedRunner, job, options)
        if self.device == CPU:
            return make
        return VerifiedFactory(make, self.names, self.sizes_bytes)

    def run(
        self,
        job: base.TrialJob,
        options: base.MeasureOptions,
        trial: tuple[SearchSpace, Configuration, Prediction | None],
        instructions: base.Instructions = base.PLAIN,
    ) -> Outcome:
        """The outcome of one trial: in every stage of the space, by prediction the hardest first.

        Raises `UnavailableError` if the device can't be emulated.
        """
        space, configuration, prediction = trial
        environment = trial_environment(self.threads)
        runner: base.TrialRunner
        if self.emulated and "GPU" not in self.resources:
            runner = EmulatedFactory(job, options, self.gpus, environment)()
        else:
            runner = IsolatedRunner(job, options, environment=environment)
        try:
            if not space.stages:
                return runner.run(configuration, instructions)
            orders = {configuration.key: hardest_first(prediction)} if prediction else {}
            return StagedRunner(runner, space, orders).run(configuration, instructions)
        finally:
            base.call_if_there(runner, "close")

    def text(self, gpu: Gpu) -> str:
        """The source of the numbers, in words for the user."""
        name = self.names[0]
        if self.emulated:
            many = f"{self.gpus} x " if self.gpus > 1 else ""
            return f"emulated {many}{name}: memory as counted there, times estimated"
        many = f"{len(self.local)} x " if len(self.local) > 1 else ""
        text = f"measured on {many}{name}"
        if self.memory_limit_bytes is not None:
            text += f", of which a trial may use {format_gib(self.memory_limit_bytes)} of memory"
        if self.stands_in:
            text += f": memory as on {gpu.name}, speed as on {name}"
        if self.awaited:
            text += ", for which the cluster has to start a node first"
        return text


def decide(
    options: SearchOptions, gpu: Gpu, *, gpus_per_trial: int = 1, machines: int = 1
) -> Measuring | Predicting:
    """Measure if this machine has the requested device or a cluster is given, else predict.

    With several `gpus_per_trial` a trial gets all of them on one machine; on several `machines`
    no trial runs.

    Raises `UnavailableError` if measuring was requested, or a cluster was given, and there is no
    device for it, and `InputError` for a memory limit that makes no sense.
    """
    mode, memory_limit, labels = options.mode, options.memory_limit, labels_of(options)
    if is_cpu(gpu):
        return _on_this_processor(gpu, options)
    if mode is Mode.PREDICT:
        if memory_limit is not None:
            raise InputError(
                "--memory-limit is for real trials, and --mode predict runs none",
                hint="--gpu-memory predicts for another amount of memory",
            )
        return Predicting("--mode predict")
    if machines > 1:
        if mode is Mode.AUTO and options.address is None:
            return Predicting(f"no trial runs on several machines (machines {machines})")
        require_one_machine(machines)
    if mode is Mode.EMULATE:
        return emulating(gpu, memory_limit, gpus=gpus_per_trial)
    if options.address is not None:
        return _in_cluster(gpu, options.address, options, labels, gpus_per_trial)
    found = _for_ranks(_on_local_gpu(gpu, memory_limit), gpus_per_trial)
    if isinstance(found, Predicting) and mode is Mode.MEASURE:
        raise UnavailableError(
            f"--mode measure has nothing to measure on: {found.why}",
            hint="--mode emulate trains on an emulated GPU, --mode predict runs none, "
            "--gpu cpu measures on the processor",
        )
    return found


EMULATED_HOST_BYTES = 6 * GIB
"""Main memory that one emulated trial may take: the need of a 27B model in NF4."""


def emulating(gpu: Gpu, memory_limit: int | None = None, *, gpus: int = 1) -> Measuring:
    """Trials on emulated GPUs of this type, with the memory of `gpu`.

    Raises `InputError` for a processor, and `UnavailableError` if this machine can't emulate.
    """
    if is_cpu(gpu):
        raise InputError(
            "--mode emulate needs a GPU type, and --gpu cpu is this machine's processor",
            hint="--mode measure runs trials on it, --gpu names a GPU type to emulate",
        )
    reason = unavailable()
    if reason is not None:
        raise UnavailableError(f"--mode emulate cannot run here: {reason}")
    at_once = max(1, host.usable_memory_bytes() // EMULATED_HOST_BYTES)
    return Measuring(
        "cuda:0",
        (gpu.device_names[0] if gpu.device_names else gpu.name,),
        (gpu.memory_bytes,),
        {"CPU": float(cpu_share(min(at_once, host.usable_cpus())))},
        memory_limit_bytes=limit_of(gpu, memory_limit, gpu.memory_bytes),
        emulated=True,
        gpus=gpus,
    )


def require_one_machine(machines: int) -> None:
    """Raise `UnavailableError` for several machines: a trial runs on one machine only."""
    if machines > 1:
        raise UnavailableError(
            f"a trial runs on one machine, and this one has machines {machines}",
            hint="`tuner estimate` or --mode predict predicts it; `tuner emulate` runs "
            "a script of one `torchrun --nnodes` a machine; for one machine, set machines=1",
        )


def _for_ranks(found: Measuring | Predicting, count: int) -> Measuring | Predicting:
    """`found` with `count` GPUs a trial."""
    if count == 1 or isinstance(found, Predicting):
        return found
    if found.local and len(found.local) < count:
        return Predicting(
            f"a trial needs {count} GPUs (gpus_per_trial), and this machine has {len(found.local)}"
        )
    # Ray gives out the resources of one bundle on one node.
    resources = {name: amount * count for name, amount in found.resources.items()}
    return dataclasses.replace(found, resources=resources)


def _on_this_processor(gpu: Gpu, options: SearchOptions) -> Measuring:
    if options.mode is Mode.PREDICT:
        raise not_predicted()
    if options.mode is Mode.EMULATE:
        emulating(gpu)  # raises
    if options.address is not None:
        raise InputError(
            "--gpu cpu is this machine's processor, but --address names another machine",
            hint="leave --address out",
        )
    if options.workers is not None and options.workers > 1:
        raise InputError(
            f"{options.workers} trials at once on one processor would disturb each other's timing",
            hint="leave --workers out",
        )
    return on_processor(gpu, options.memory_limit)


def on_processor(gpu: Gpu, memory_limit: int | None) -> Measuring:
    """Trials on this machine's processor, with no more memory than the user says that it has."""
    # Waiting OpenMP threads spin by default, and delay those that they wait for where anything
    # else runs: on two busy cores, a step of a tiny model took 3.3 s instead of 0.7 s.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    limit = limit_of(gpu, memory_limit, host.usable_memory_bytes())
    resources = {"CPU": float(cpu_share(1))}
    return Measuring(CPU, (gpu.name,), (gpu.memory_bytes,), resources, memory_limit_bytes=limit)


def _in_cluster(
    gpu: Gpu, address: str, options: SearchOptions, labels: Mapping[str, str], gpus: int
) -> Measuring:
    checked_address(address)
    from tuner.searches.ray.cluster import survey  # Ray: seconds to import

    resources = {"GPU": float(gpus), "CPU": float(gpus)}
    if options.host_memory is not None:
        resources["memory"] = float(options.host_memory)
    need = Need(resources, gpu, labels).asking()
    found = survey(address, [need])
    if not found.met and not found.grows:
        raise found.missing
    return Measuring(
        "cuda:0",
        gpu.device_names,
        tuple(filter(None, (gpu.memory_bytes, gpu.ecc_memory_bytes))),
        resources,
        memory_limit_bytes=limit_of(gpu, options.memory_limit, gpu.memory_bytes),
        awaited=not found.met,
        emulated=found.emulated,
        gpus=gpus,
    )


def _on_local_gpu(gpu: Gpu, memory_limit: int | None) -> Measuring | Predicting:
    devices = local_gpus()
    same = [d for d in devices if d.gpu is not None and d.gpu.id == gpu.id]
    if same:
        return _measuring(gpu, same, limit_of(gpu, memory_limit, same[0].total_bytes))
    if not devices:
        if memory_limit is not None:
            raise InputError(
                "--memory-limit needs a GPU to limit, and this machine has none",
                hint="--gpu-memory predicts for another amount of memory",
            )
        return Predicting(no_gpu())
    largest = max(devices, key=lambda d: d.total_bytes)
    there = f"{largest.name} with {format_gib(largest.total_bytes)}"
    if memory_limit is None:
        text = f"this machine has no {gpu.name}"
        if largest.total_bytes > gpu.memory_bytes:
            return Predicting(f"{text} ({there} stands in for one with --memory-limit auto)")
        return Predicting(f"{text}, only {there}")
    if largest.total_bytes < gpu.memory_bytes * SMALLER:
        raise InputError(
            f"{there} is too small to stand in for {gpu.name} with {format_gib(gpu.memory_bytes)}"
        )
    limit = limit_of(gpu, memory_limit, largest.total_bytes)
    same = [d for d in devices if d.name == largest.name]
    return _measuring(gpu, same, limit, stands_in=True)


def _measuring(
    gpu: Gpu, devices: Sequence[LocalGpu], limit_bytes: int | None, *, stands_in: bool = False
) -> Measuring:
    return Measuring(
        "cuda:0",
        (devices[0].name,),
        tuple(dict.fromkeys(d.total_bytes for d in devices)),
        {"GPU": 1.0, "CPU": float(cpu_share(len(devices)))},
        local=tuple(d.index for d in devices),
        memory_limit_bytes=limit_bytes,
        stands_in=stands_in,
        emulated=is_emulated(),  # if this process itself runs on an emulated machine
    )


def cpu_share(devices: int) -> int:
    """Processors for each trial if each of `devices` runs one trial.

    A processor counts as one device: two trials at once would slow each other down.
    """
    return max(1, host.usable_cpus() // devices)


def limit_of(gpu: Gpu, asked: int | None, device_bytes: int) -> int | None:
    """The memory limit in bytes, or None. `device_bytes` is the device's own memory."""
    if asked is None:
        # The memory given by the user for the GPU, or the memory of a smaller type.
        return gpu.memory_bytes if gpu.memory_bytes < device_bytes * SMALLER else None
    limit = gpu.memory_bytes if asked == LIMIT_OF_TYPE else asked
    if limit > device_bytes:
        raise InputError(
            f"--memory-limit {format_gib(limit)} is more than the device has "
            f"({format_gib(device_bytes)})"
        )
    return limit
