"""One real trial, inside its own process: load, warm up, time steps, and say what it took.

What was learnt on the way is reported as it is learnt, so that a process that is killed leaves
it behind.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tuner.errors import InputError
from tuner.host import cpu_name
from tuner.models.catalogue import resolve_config
from tuner.records import Configuration, Measurement, Memory, Phase, Speed
from tuner.runner.base import MeasureOptions, TrialJob
from tuner.runner.device import RealEnvironment, limit_memory, open_session, parse_device
from tuner.runner.footprint import DeviceMemory, Footprint
from tuner.runner.gpu_watch import GpuActivity, GpuWatch
from tuner.runner.mfu import mfu
from tuner.runner.rate import MeanInterval, RunningMean
from tuner.runner.settings import apply_settings
from tuner.runner.stop_rule import StopRule, thorough
from tuner.runner.verification import LastCall, evaluate_and_save
from tuner.units import format_gib
from tuner.workloads import get_workload
from tuner.workloads.base import TrainingSession

Report = Callable[[Mapping[str, Any]], None]

SEED = 0
"""Of synthetic weights and tokens: two trials of one configuration do the same work."""


def measure(
    job: TrialJob, configuration: Configuration, options: MeasureOptions, report: Report
) -> Measurement:
    """Train `configuration` for some steps on `options.device`, and return what that took.

    Whatever goes wrong is raised: `InputError` for what cannot be built, and everything that
    PyTorch and the operating system raise. A loss that is not finite ends the timed steps and
    is in the measurement. `report` is called with JSON facts: "device", "phase" (of warm-up
    steps; null while steps are timed), "load_s", "loaded_bytes", "trainable_params",
    "total_params", "first_step_s", "phase_peak_bytes", "peak_reserved_bytes".

    The process must be a fresh one that has imported what training needs (`Training.prepare`):
    limits and settings stay in force, and the memory of an import would be taken for the trial's.
    """
    if options.instructions.verify:
        options = thorough(options)
    torch.manual_seed(SEED)
    started = time.perf_counter()
    notes = apply_settings(configuration, options.device)
    place = _Place(job, options)
    report({"device": place.name})
    environment = RealEnvironment(
        options.device,
        checkpoint=_checkpoint(job, options),
        data=job.data if options.lengths == "data" else None,
        full_steps=options.warmup_steps,
        on_phase=lambda phase: report({"phase": str(phase)}),
    )
    with _last_words(environment, report):
        session = open_session(
            get_workload(job.workload),
            resolve_config(job.model) if job.model is not None else None,
            configuration,
            environment,
        )
        environment.synchronize()
        load_s = time.perf_counter() - started
        report(_loaded(session, load_s))
        micro_steps = int(str(configuration.get("grad_accum", 1)))
        call = LastCall(session, environment) if options.instructions.verify else None
        rule = StopRule(options, lambda: place.device_bytes(environment))
        first_step_s = _warm_up(session, environment, micro_steps, rule)
        report({"first_step_s": first_step_s, **_peaks(environment), "phase": None})
        timed = _timed_steps(session, environment, micro_steps, rule)
        evaluation_peak, checkpoint = None, None
        if call is not None:
            evaluation_peak, checkpoint = evaluate_and_save(session, call, environment)
        memory, device_memory = place.memory(environment)
        session.close()
    return Measurement(
        memory=memory,
        speed=_speed(timed, micro_steps, mfu(timed.flops_per_s, configuration, place.gpu)),
        trainable_params=session.trainable_params,
        total_params=session.total_params,
        device=place.name,
        steps=timed.interval.count,
        loss_finite=timed.loss_finite,
        warmup_steps=rule.warmup_steps,
        load_s=load_s,
        first_step_s=first_step_s,
        samples_per_s_interval=timed.interval.rates(timed.samples / timed.interval.count),
        stopped_by=timed.stopped_by,
        padded_tokens_per_s=timed.padded_tokens / timed.total_s,
        data_wait_fraction=timed.data_wait_s / timed.total_s,
        evaluation_peak_bytes=evaluation_peak,
        checkpoint_bytes=checkpoint,
        num_alloc_retries=place.alloc_retries(),
        timed_alloc_retries=timed.alloc_retries,
        nvml_process_bytes=device_memory.process_bytes,
        nvml_device_bytes=device_memory.device_bytes,
        gpu_utilization=timed.activity.utilization,
        power_w=timed.activity.power_w,
        energy_j_per_sample=timed.energy_j_per_sample,
        energy_source=timed.activity.energy_source,
        memory_limit_bytes=options.memory_limit_bytes,
        weights=environment.checkpoint or "synthetic",
        lengths=options.lengths,
        cpu_threads=torch.get_num_threads() if options.device == "cpu" else None,
        notes=(*notes, *place.notes),
    )


class _Place:
    """The device of a trial: its name, the GPU type it really is, and its memory."""

    def __init__(self, job: TrialJob, options: MeasureOptions) -> None:
        self._device = parse_device(options.device)
        self._job = job
        self._footprint: Footprint | None = None
        self.notes: list[str] = []
        if self._device.type == "cuda":
            self._footprint = Footprint(self._device)
            torch.zeros(1, device=self._device)  # creates the context
            self.name = torch.cuda.get_device_name(self._device)
            self.gpu = self._real_gpu()
        else:
            self.name = cpu_name()
            self.gpu = job.gpu
        if options.memory_limit_bytes is not None:
            # What the driver and the context take of a device is part of its memory.
            context = self._context_bytes() if self._footprint else 0
            if options.memory_limit_bytes <= context:
                raise InputError(
                    f"a memory limit of {format_gib(options.memory_limit_bytes)} leaves nothing "
                    f"beside the CUDA context, which takes {format_gib(context)}"
                )
            limit_memory(options.device, options.memory_limit_bytes - context)

    def memory(self, environment: RealEnvironment) -> tuple[Memory, DeviceMemory]:
        """Peaks of all steps so far, and what the driver counts now."""
        peaks = _peaks(environment)
        reserved = peaks["peak_reserved_bytes"]
        phases = peaks["phase_peak_bytes"]
        known = self._footprint.read() if self._footprint else DeviceMemory(None, None, None)
        context = self._context_bytes(known) if self._footprint else 0
        memory = Memory(
            peak_allocated_bytes=peaks["peak_allocated_bytes"],
            peak_reserved_bytes=reserved,
            device_bytes=reserved + context,
            loaded_bytes=environment.loaded_bytes or 0,
            phase_peak_bytes=phases,
            peak_phase=max(phases, key=lambda name: int(phases[name]), default=""),
            breakdown={},
        )
        return memory, known

    def device_bytes(self, environment: RealEnvironment) -> int:
        """The highest device memory so far; reads the driver once a call."""
        context = self._context_bytes() if self._footprint else 0
        return int(_peaks(environment)["peak_reserved_bytes"]) + context

    def alloc_retries(self) -> int | None:
        """How often the allocator gave cached blocks back; None on the processor."""
        return alloc_retries(self._device)

    def _real_gpu(self) -> Any:
        """The catalogue's entry of this very device; None for one that is not in it."""
        from tuner.gpus import match_device

        if self.name in self._job.gpu.device_names:
            return self._job.gpu
        total = torch.cuda.get_device_properties(self._device).total_memory
        return match_device(self.name, total)

    def _context_bytes(self, known: DeviceMemory | None = None) -> int:
        assert self._footprint is not None
        known = known or self._footprint.read()
        if known.context_bytes is not None:
            return known.context_bytes
        note = (
            "the driver does not tell what the CUDA context takes: the catalogue's size stands in"
        )
        if note not in self.notes:
            self.notes.append(note)
        return self._job.gpu.context_bytes


@dataclass(frozen=True, slots=True)
class _Timed:
    """What the timed steps came to."""

    interval: MeanInterval
    total_s: float
    samples: int
    tokens: int
    padded_tokens: int
    model_flops: float | None
    data_wait_s: float
    loss_finite: bool
    stopped_by: str
    alloc_retries: int | None
    activity: GpuActivity

    @property
    def flops_per_s(self) -> float | None:
        return None if self.model_flops is None else self.model_flops / self.total_s

    @property
    def energy_j_per_sample(self) -> float | None:
        energy_j = self.activity.energy_j
        return None if energy_j is None else energy_j / self.samples


def _warm_up(
    session: TrainingSession, environment: RealEnvironment, micro_steps: int, rule: StopRule
) -> float:
    """Steps that are not timed; the seconds of the first. Peaks are noted by phase."""
    first_step_s: float | None = None
    ended = False
    while not ended:
        before, started = session.counts.samples, time.perf_counter()
        session.optimizer_step(micro_steps)
        environment.synchronize()
        step_s = time.perf_counter() - started
        first_step_s = step_s if first_step_s is None else first_step_s
        ended = rule.ends_warm_up(session.counts.samples - before, step_s)
    assert first_step_s is not None
    environment.note_peak()
    environment.recording = False
    return first_step_s


def _timed_steps(
    session: TrainingSession,
    environment: RealEnvironment,
    micro_steps: int,
    rule: StopRule,
) -> _Timed:
    """Time steps until their mean is known well enough, or the budget is spent."""
    device = parse_device(environment.device)
    before = session.counts
    before_samples = before.samples
    start = (before_samples, before.tokens, before.padded_tokens, before.data_wait_s)
    start_flops, retries = before.model_flops, alloc_retries(device)
    mean, stopped_by = RunningMean(), None
    with GpuWatch(device.index if device.type == "cuda" else None) as watch:
        while stopped_by is None:
            started = time.perf_counter()
            session.optimizer_step(micro_steps)
            environment.synchronize()
            mean.add(time.perf_counter() - started)
            # Asked between the steps: the answer waits for the device.
            finite = math.isfinite(float(session.loss))
            step_samples = (session.counts.samples - before_samples) // mean.interval().count
            stopped_by = rule.reason_to_stop(mean, step_samples) if finite else "loss"
    after = session.counts
    samples, tokens, padded, waited_s = (
        now - then
        for now, then in zip(
            (after.samples, after.tokens, after.padded_tokens, after.data_wait_s),
            start,
            strict=True,
        )
    )
    end_flops, end_retries = after.model_flops, alloc_retries(device)
    return _Timed(
        interval=mean.interval(),
        total_s=mean.total_s,
        samples=int(samples),
        tokens=int(tokens),
        padded_tokens=int(padded),
        model_flops=_difference(end_flops, start_flops),
        data_wait_s=waited_s,
        loss_finite=finite,
        stopped_by=stopped_by,
        alloc_retries=None if end_retries is None else end_retries - (retries or 0),
        activity=watch.activity,
    )


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def alloc_retries(device: torch.device) -> int | None:
    """`num_alloc_retries` of PyTorch's allocator so far; None on the processor."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def _speed(timed: _Timed, micro_steps: int, share_of_peak: float | None) -> Speed:
    step_s = timed.interval.mean_s
    return Speed(
        step_s=step_s,
        it_per_s=micro_steps / step_s,
        samples_per_s=timed.samples / timed.total_s,
        tokens_per_s=timed.tokens / timed.total_s,
        mfu=share_of_peak,
    )


def _loaded(session: TrainingSession, load_s: float) -> dict[str, Any]:
    return {
        "load_s": load_s,
        "trainable_params": session.trainable_params,
        "total_params": session.total_params,
    }


def _peaks(environment: RealEnvironment) -> dict[str, Any]:
    """The highest memory so far, in all and by phase, in bytes."""
    allocated, reserved = environment.meter.peaks()
    return {
        "loaded_bytes": environment.loaded_bytes,
        "phase_peak_bytes": {str(p): n for p, n in environment.phase_peak_bytes.items()},
        "peak_allocated_bytes": max(environment.peak_allocated_bytes, allocated),
        "peak_reserved_bytes": max(environment.peak_reserved_bytes, reserved),
    }


@contextlib.contextmanager
def _last_words(environment: RealEnvironment, report: Report) -> Iterator[None]:
    """Report phase and peaks before what was raised goes on."""
    try:
        yield
    except BaseException:
        phase: Phase | None = environment.phase
        retries = alloc_retries(parse_device(environment.device))
        facts = {"phase": str(phase) if phase else None, "num_alloc_retries": retries}
        report({**facts, **_peaks(environment)})
        raise


def _checkpoint(job: TrialJob, options: MeasureOptions) -> str | None:
    """Where real weights come from: a hub id or a path; None for synthetic ones."""
    if options.weights == "synthetic":
        return None
    if job.model is None:
        raise InputError(f"--weights {options.weights} is about a model, and the space names none")
    if options.weights != "hub":
        return options.weights
    from tuner.models.catalogue import get_entry

    entry = get_entry(job.model)
    return entry.hub_id if entry else job.model
