"""The result of running a program on emulated GPUs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tuner.core.errors import EXIT_BAD_INPUT, EXIT_UNAVAILABLE, verdict_code
from tuner.core.gpu import Gpu
from tuner.core.host import usable_memory_bytes
from tuner.core.records import Memory, MemoryBudget, Phase, RunTime, Verdict
from tuner.emulator.ending import Afterwards, Ended, OwnFault, ProgramError, Refusal, last_fatal
from tuner.emulator.session import Account, DevicePeak
from tuner.emulator.step_time import EmulatedStepTime


@dataclass(frozen=True, slots=True)
class _DecodeLoops:
    """`times` decode loops of `tokens` tokens, of which `run` ran; the others repeat them.

    The number of tokens is the longest that was asked for: ends by a special token are unknown.
    """

    tokens: int
    run: int
    is_steady: bool
    """The last tokens, which ran as well, requested what the pattern says."""
    times: int


@dataclass(frozen=True, slots=True)
class _DeclaredEngine:
    """vLLM, which is not emulated: memory as declared, and no time.

    In the mode "colocate" it takes `bytes`, a `share` of the device's memory (TRL's
    `vllm_gpu_memory_utilization`), and none of it in the training if it `sleeps`. The mode "server"
    takes none on this device but the buffers of its weight updates, whose size is unknown.
    """

    mode: str
    share: float
    bytes: int
    sleeps: bool


def decode_loops(events: Iterable[Mapping[str, Any]]) -> tuple[_DecodeLoops, ...]:
    """The decode loops of the first rank that were extrapolated, the longest first."""
    ended = [one for one in events if one["event"] == "decoding" and one["rank"] == "0"]
    times = Counter((one["tokens"], one["run"], one["is_steady"]) for one in ended)
    return tuple(
        _DecodeLoops(*loop, number) for loop, number in sorted(times.items(), reverse=True)
    )


def declared_engine(events: Iterable[Mapping[str, Any]]) -> _DeclaredEngine | None:
    """The engine that generates for the first rank."""
    names = [field.name for field in dataclasses.fields(_DeclaredEngine)]
    started = (one for one in events if one["event"] == "engine" and one["rank"] == "0")
    return next((_DeclaredEngine(**{name: one[name] for name in names}) for one in started), None)


STEPS = 3
"""Updates of the optimizer: the first makes its state, the second finds it, the third shows that
nothing grows."""

FEW = 2
"""From this many micro-batches per step on, gradients of one are present while the next runs: more
micro-batches change neither the memory nor the time of one."""

BRANCH = "branch"
"""The kind of an unknown value by which the program branches; it decides no size."""

RUN_PHASES = ("load", "steps", "largest batch", "evaluation", "save", "resume", "end")
"""The phases of a run that nearly every training has."""

FIRST_STEPS = 3
"""Steps after which a whole run goes on, and growing memory is known (inside/memory.py)."""

_WITH_STATES = 2
_ABOUT = 0.98
"""Phases from this share of the highest use of the host on are as high."""

UNKNOWN = (Ended.LATER, Ended.HOST)
"""Failures that are neither the program's nor a lack of tuner's: only another run tells."""
FAILED = (Ended.ERROR, Ended.CRASH, Ended.FAULT, Ended.UNSUPPORTED, *UNKNOWN)
"""Endings that say nothing of the memory."""


@dataclass(frozen=True, slots=True)
class EmulatedAllocation:
    """Memory that one line of code holds on the device at the peak.

    `where` is the innermost line outside of PyTorch, `line` the program's own; both may be empty.
    """

    kind: str
    where: str
    line: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class _GrowingMemory:
    """Memory that a line of the program keeps from each step, to the end of an `each_epoch`."""

    line: str
    bytes_per_step: int
    each_epoch: bool = False


@dataclass(frozen=True, slots=True)
class _DataRead:
    """The rows behind a data loader, and its largest batch, of a run that was shortened.

    `read` of the `of` rows were measured; `of` is None for a stream, of which nothing else is
    known. Row `row` has `size` `unit`s, the most in the largest batch of `rows`: batch `batch` of
    `batches`, in step `step`, with `accumulation` batches in a step. `longer` is the share of rows
    longer than some lengths.
    """

    trains: bool
    read: int
    of: int | None
    row: int | None = None
    size: int = 0
    unit: str = ""
    rows: int = 0
    batch: int = 0
    batches: int = 0
    step: int = 0
    accumulation: int = 1
    longer: Mapping[str, float] = dataclasses.field(default_factory=dict)
    step_sizes: tuple[int, ...] = ()
    """`unit`s, padding included, of each of the first steps; empty if not all rows were read."""
    epoch_size: int = 0
    """`unit`s of all batches of an epoch, padding included."""
    read_s: float | None = None
    """Seconds in which a batch was read on this machine's processor; None with workers."""

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        return self.batches // self.accumulation


@dataclass(frozen=True, slots=True)
class EmulatedDeviceUse:
    """The use of one emulated device by one process.

    `device_bytes` is the driver's count: reserved memory, context, and memory outside PyTorch.
    `managed_bytes` (paged optimizers) is in none of the others. `run_phases` are the most allocated
    and reserved bytes of each phase of the run, in their order.
    """

    rank: int
    device: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    managed_bytes: int
    loaded_bytes: int
    phase_peak_bytes: Mapping[str, int]
    peak_phase: str
    breakdown: Mapping[str, int]
    allocations: tuple[EmulatedAllocation, ...]
    alloc_retries: int
    ooms: int
    trainable_params: int
    run_phases: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    growth: tuple[_GrowingMemory, ...] = ()
    evaluation_growth_bytes: int = 0
    """Memory that an evaluation keeps from each of its batches."""
    evaluation_peak_bytes: int = 0
    """Allocated memory at the peak of an evaluation's third batch."""

    def device_bytes_in(self, phase: str) -> int:
        """The device memory in a phase of the run."""
        return self.device_bytes - self.peak_reserved_bytes + self.run_phases[phase][1]


@dataclass(frozen=True, slots=True)
class _HostUse:
    """Host memory of all processes of a whole run: the most in each phase, in bytes.

    Large tensors count as allocated, all else as measured in the emulated processes, without
    `emulator_bytes` of tuner itself. What CUDA's context takes on the host, and what malloc keeps,
    are not known and not counted. `worker_bytes` is the most that worker processes add.
    `limit_bytes` is the memory of this machine, or that of `--host-memory` if it `is_stated`.
    """

    phases: Mapping[str, int]
    worker_bytes: int
    emulator_bytes: int
    limit_bytes: int
    is_stated: bool

    @property
    def peak_phase(self) -> str:
        """The last of the phases with the highest use: a save begins with what it gathered."""
        most = _ABOUT * max(self.phases.values())
        return [phase for phase, size in self.phases.items() if size >= most][-1]

    @property
    def peak_bytes(self) -> int:
        """The highest use."""
        return max(self.phases.values())

    @property
    def is_killed(self) -> bool:
        """True if Linux kills a process because the machine has no memory left."""
        return self.peak_bytes > self.limit_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        peak = {"peak_phase": self.peak_phase, "peak_bytes": self.peak_bytes}
        return {**dataclasses.asdict(self), **peak, "is_killed": self.is_killed}


@dataclass(frozen=True, slots=True)
class UnknownValues:
    """Values that the emulator could not compute, and how often `operator` asked for them.

    `kind` says what took their place: "at most" (the size is the largest possible), "assumed"
    (choices spread evenly; floats that are finite), "made up" or "unknown" (no bound is known), or
    "branch" (a condition on a made-up value).
    With `decides_shape` they decided the size of a tensor; else the program read or lost them.
    """

    operator: str
    line: str | None
    kind: str
    decides_shape: bool
    times: int


@dataclass(frozen=True, slots=True)
class Emulation:
    """The result of running a program on emulated GPUs; every number in it is *emulated*."""

    command: tuple[str, ...]
    gpu: Gpu
    gpus: int
    torch: str
    cuda: str
    ended: Ended
    steps: int
    margin_bytes: int
    exit_status: int
    devices: tuple[EmulatedDeviceUse, ...]
    """One entry per rank and device, in their order."""
    peaks: tuple[DevicePeak, ...]
    """The memory of all processes together, by device."""
    error: ProgramError | None
    refusals: tuple[Refusal, ...]
    """The requests that a device had no memory for, and how the program went on."""
    unknown_calls: Mapping[str, int]
    """Calls of functions of CUDA's libraries that the emulator does not know."""
    unknown_values: tuple[UnknownValues, ...]
    """Values that could not be computed and may matter, by operator and line."""
    duration_s: float
    time: EmulatedStepTime | None
    """The time of an optimizer step; None if none ended or its work is unknown."""
    stands_for: int
    """Ranks of the training that the one process stands for; 1 if each rank ran."""
    settings: Mapping[str, Any]
    """The settings of the training as they reached the trainer and the model, by knob."""
    inputs: tuple[tuple[int, int], ...]
    """(sequences, tokens of each) of every forward pass of one rank in the step of `time`, padding
    included; empty for a model without a table of embeddings."""
    asked: str | None = None
    """The line of the program that read its empty standard input; "" for an unknown one."""
    own_fault: OwnFault | None = None
    """A fault in tuner itself, after which no number in the result is reliable."""

    whole: bool = False
    """True if the run went on, shortened, after its first steps."""
    later_error: ProgramError | None = None
    """A failure of a whole run after its first steps, where values are made up."""
    data: tuple[_DataRead, ...] = ()
    """The data of loaders that were shortened, in the order of their first use."""
    run_steps: int | None = None
    """Optimizer steps of the whole training, as its trainer counts them."""
    run_evaluations: int = 0
    """Evaluations of the whole training."""
    is_cut: bool = False
    """True for a whole run that did not come to its own end with all of its batches."""
    of_steps: int | None = None
    """Optimizer steps of the whole training, by the loops around a step; None if not known."""
    unreached: tuple[str, ...] = ()
    """Lines of the training that were not reached, may be later, and may allocate."""
    host: _HostUse | None = None
    """The memory of the host in a whole run; None if it is not known."""
    compares: str = ""
    """The loss or layer that takes all samples of a micro-batch together; empty for none."""
    steps_by: str = ""
    """The sign by which steps were counted; empty for updates of optimizers."""
    decoding: tuple[_DecodeLoops, ...] = ()
    """The decode loops of the first rank that were extrapolated, the longest first."""
    engine: _DeclaredEngine | None = None
    """The engine that generates in place of the program; None if there is none."""

    @property
    def source(self) -> str:
        """The source of the numbers, as in records."""
        return "emulated"

    @property
    def not_run(self) -> tuple[str, ...]:
        """The phases of a run that did not come."""
        ran = self.limiting.run_phases if self.limiting else {}
        return tuple(phase for phase in RUN_PHASES if phase not in ran) if self.whole else ()

    @property
    def generates(self) -> bool:
        """True if the training generates tokens: more micro-batches then take more memory."""
        return self.limiting is not None and Phase.GENERATE in self.limiting.phase_peak_bytes

    @property
    def ends_at_step(self) -> int | None:
        """The step at which memory that grows is full; None if none grows, or it ran out before."""
        use = self.limiting
        growing = sum(one.bytes_per_step for one in use.growth) if use else 0
        is_whole = self.whole and not self.is_cut
        if use is None or not growing or is_whole or self.ended is Ended.OOM:
            return None
        free = self.gpu.memory_bytes - use.device_bytes_in("steps")
        return FIRST_STEPS + max(0, free) // growing + 1

    @property
    def all_steps(self) -> int | None:
        """The optimizer steps of the whole training; None if nothing tells them."""
        return self.run_steps or self.of_steps

    @property
    def training_data(self) -> _DataRead | None:
        """The data that it trains on, if that was shortened."""
        return next((data for data in self.data if data.trains), None)

    @property
    def run_time(self) -> RunTime | None:
        """The time of the training; None if its steps or the time of a step is not known.

        All of a step but its launches takes as long as its rows are, padding included, and an
        evaluation the time of as long forward passes. A loop without a data loader tells its steps.
        """
        time, data = self.time, self.training_data
        if time is not None and data is None and self.all_steps:
            steps, (least_s, most_s) = self.all_steps, time.interval_s
            ends_s = (steps * least_s, steps * most_s)
            return RunTime(steps, 0, is_whole=True, seconds=steps * time.step_s, interval_s=ends_s)
        if time is None or data is None or not data.steps:
            return None
        launch_s = time.breakdown_s.get("launch", 0.0)
        size = data.step_sizes[time.step - 1] if time.step <= len(data.step_sizes) else 0
        mean = data.epoch_size / data.batches * data.accumulation
        step_s = launch_s + (time.step_s - launch_s) * (mean / size if size else 1.0)
        steps = self.run_steps or data.steps
        seconds = steps * step_s
        tested = next((one for one in self.data if not one.trains), None)
        evaluations = self.run_evaluations if tested is not None and size else 0
        if tested is not None and evaluations:
            forward_s = time.phases_s.get("forward", 0.0)
            seconds += evaluations * forward_s * tested.epoch_size / size
        low, high = (end / time.step_s for end in time.interval_s)
        interval_s = (seconds * low, seconds * high)
        return RunTime(steps, evaluations, self.run_steps is not None, seconds, interval_s)

    @property
    def refused(self) -> Refusal | None:
        """The request that ran out of memory; None if none ended a process."""
        return last_fatal(self.refusals)

    @property
    def survived(self) -> tuple[Refusal, ...]:
        """The requests without which the program trained on."""
        return tuple(r for r in self.refusals if r.afterwards is Afterwards.SURVIVED)

    @property
    def limiting(self) -> EmulatedDeviceUse | None:
        """The device use with the most memory."""
        return max(self.devices, key=lambda use: use.device_bytes, default=None)

    @property
    def fits(self) -> bool | None:
        """The verdict with the margin; None if the program failed or ended too early.

        Sizes that are upper bounds can only show that it fits; made-up ones show nothing.
        """
        fits = self._fits_as_it_ran
        bounded = self.sizes == "at most" and fits is False
        is_served = self.engine is not None and self.engine.mode == "server"
        is_partial = bool(fits) and (is_served or self.may_grow or bool(self.unreached))
        return None if bounded or is_partial or self.sizes == "unknown" else fits

    @property
    def _fits_as_it_ran(self) -> bool | None:
        if self.ended is Ended.OOM:
            return False
        if self.ended in FAILED or self.limiting is None:
            return None
        if self._grows_too_much or self.host_is_full:
            return False
        fits = self.budget.fits(self.used_bytes)
        if fits and self.survived:
            return None
        # The first step creates the optimizer's states, and only the second runs with them. A
        # program that ends by itself needs no second step, unless a made-up value ended it.
        stopped = self.ended is Ended.TIMEOUT or (
            self.ended is Ended.END and any(one.kind == BRANCH for one in self.unknown_values)
        )
        enough = _WITH_STATES if stopped else 1
        return fits if self.steps >= enough or (self.steps and not fits) else None

    @property
    def budget(self) -> MemoryBudget:
        """The GPU's memory; all of it where the program itself found out how much it can take."""
        adapts = any(one.afterwards is Afterwards.RECOVERED for one in self.refusals)
        return MemoryBudget(self.gpu.memory_bytes, 0 if adapts else self.margin_bytes)

    @property
    def evaluation_ends_at(self) -> tuple[int, int] | None:
        """The batch of an evaluation at which memory is full, of how many; None if it never is."""
        use = self.limiting
        data = next((data for data in self.data if not data.trains and data.of), None)
        if use is None or data is None or not use.evaluation_growth_bytes:
            return None
        context_bytes = use.device_bytes - use.peak_reserved_bytes
        free = self.gpu.memory_bytes - context_bytes - use.evaluation_peak_bytes
        last = FIRST_STEPS + max(0, free) // use.evaluation_growth_bytes + 1
        return (last, data.batches) if last <= data.batches else None

    is_upper_bound: ClassVar[bool] = False

    @property
    def host_is_full(self) -> bool:
        """True if the host has too little memory: that of `--host-memory`, not this machine's."""
        return self.host is not None and self.host.is_stated and self.host.is_killed

    @property
    def _grows_too_much(self) -> bool:
        """True if memory that grows is full before the training, or an evaluation, ends."""
        ends, data = self.ends_at_step, self.training_data
        least = self._growing_steps or (data.steps if data is not None else 0)
        return (ends is not None and ends <= least) or self.evaluation_ends_at is not None

    @property
    def _growing_steps(self) -> int | None:
        """The steps in which memory grows: of an epoch, if its end frees what it kept."""
        use, data = self.limiting, self.training_data
        if use is not None and data is not None and all(one.each_epoch for one in use.growth):
            return data.steps
        return self.all_steps

    @property
    def may_grow(self) -> bool:
        """True if memory grows, and nothing tells the step at which a whole run ends."""
        return self.whole and self.ends_at_step is not None and self._growing_steps is None

    @property
    def verdict(self) -> Verdict:
        """The verdict in a word; the emulated size has no interval."""
        if self.fits is None:
            return Verdict.UNKNOWN
        if self.ended is Ended.OOM or self._grows_too_much or self.host_is_full:
            return Verdict.DOES_NOT_FIT
        return self.budget.verdict(self.used_bytes)

    @property
    def exit_code(self) -> int:
        """The exit code (`tuner.core.errors`) for the verdict, or for the ending if it failed."""
        if self.ended is Ended.ERROR and not self.unknown_calls:
            return EXIT_BAD_INPUT
        is_unavailable = self.ended in FAILED and self.ended not in UNKNOWN
        return EXIT_UNAVAILABLE if is_unavailable else verdict_code(self.fits)

    @property
    def sizes(self) -> str:
        """The certainty of the tensor sizes; see `sizes_rest_on`."""
        return sizes_rest_on(self.unknown_values)

    @property
    def ranks(self) -> int:
        """Processes that train together; one may have several GPUs, of which one waits for another.

        A loop over several GPUs in one process is priced as if they worked one after the other.
        """
        return max(self.stands_for, len({use.rank for use in self.devices}))

    @property
    def memory(self) -> Memory | None:
        """The memory of the device with the most: of one process, `device_bytes` of all of them."""
        use = self.limiting
        if use is None:
            return None
        parts = dict(use.breakdown)
        if parts:
            # Sizes of the history are rounded up as the allocator does; a rest that it does not
            # split off belongs to the block.
            parts["allocator_overhead"] = use.peak_reserved_bytes - sum(parts.values())
            parts["context"] = use.device_bytes - use.peak_reserved_bytes
        return Memory(
            peak_allocated_bytes=use.peak_allocated_bytes,
            peak_reserved_bytes=use.peak_reserved_bytes,
            device_bytes=self.used_bytes,
            loaded_bytes=use.loaded_bytes,
            phase_peak_bytes=use.phase_peak_bytes,
            peak_phase=use.peak_phase,
            breakdown=parts,
            paged_bytes=use.managed_bytes,
        )

    @property
    def interval(self) -> None:
        """None: the emulated memory is exact."""

    @property
    def used_bytes(self) -> int:
        """The peak of all processes together, on the device with the highest."""
        is_known = all(one.afterwards is Afterwards.RECOVERED for one in self.refusals)
        sizes = (max(p.bytes, 0 if is_known else p.given_up_bytes) for p in self.peaks)
        return max(sizes, default=0)

    @property
    def peak(self) -> DevicePeak | None:
        """The peak of the device with the highest; None if none was used."""
        return max(self.peaks, key=lambda one: one.bytes, default=None)

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        data = dataclasses.asdict(self)
        data.update(
            source=self.source,
            gpu=self.gpu.id,
            gpu_memory_bytes=self.gpu.memory_bytes,
            fits=self.fits,
            used_bytes=self.used_bytes,
            not_run=list(self.not_run),
            ends_at_step=self.ends_at_step,
            evaluation_ends_at=self.evaluation_ends_at,
            host=None if self.host is None else self.host.to_dict(),
            run_time=None if self.run_time is None else dataclasses.asdict(self.run_time),
            command=list(self.command),
        )
        return data


def sizes_rest_on(values: Iterable[UnknownValues]) -> str:
    """The certainty of a program's tensor sizes: "known", "at most" or "unknown".

    Memory is an upper bound if sizes are "at most". Evenly spread loads of experts count as known,
    because their sum is known.
    """
    kinds = {one.kind for one in values if one.decides_shape}
    if kinds & {"made up", "unknown"}:
        return "unknown"
    return "at most" if "at most" in kinds else "known"


def unknown_values(results: list[dict[str, Any]]) -> tuple[UnknownValues, ...]:
    """The unknown values of all ranks; values that decide sizes come first."""
    times: Counter[tuple[str, str | None, str, bool]] = Counter()
    for row in (row for result in results for row in result["values_unknown"]):
        times[row["operator"], row["line"], row["kind"], row["decides_shape"]] += row["times"]
    rows = [UnknownValues(*key, number) for key, number in times.items()]
    return tuple(sorted(rows, key=lambda row: (not row.decides_shape, -row.times)))


def host_use(results: Iterable[Mapping[str, Any]], stated: int | None) -> _HostUse | None:
    """The host memory of all ranks together; None if their results have none."""
    phases: Counter[str] = Counter()
    workers = own = 0
    for result in results:
        host, ranks = result["host"], result["stands_for"]
        for phase, (process, in_workers) in (host["phases"] if host else {}).items():
            phases[phase] += ranks * (process + in_workers)
            workers = max(workers, ranks * in_workers)
        own += host["own_bytes"] if host else 0
    limit = usable_memory_bytes() if stated is None else stated
    return _HostUse(dict(phases), workers, own, limit, stated is not None) if phases else None


def data_read(events: Iterable[Mapping[str, Any]]) -> Iterator[_DataRead]:
    """The data behind the loaders of the first rank."""
    names = [field.name for field in dataclasses.fields(_DataRead)]
    for event in events:
        if event["event"] == "data" and event["rank"] == "0":
            yield _DataRead(**{name: event[name] for name in names if name in event})


def device_uses(
    results: Iterable[Mapping[str, Any]], accounts: Iterable[Account]
) -> list[EmulatedDeviceUse]:
    """The uses of all devices by all processes, in the order of `results`."""
    by_place = {(account.pid, account.device): account for account in accounts}
    found = []
    for result in results:
        for one in result["devices"]:
            account = by_place.get((result["pid"], one["physical"]))
            if account is None:
                continue
            found.append(
                EmulatedDeviceUse(
                    rank=result["rank"],
                    device=one["physical"],
                    device_bytes=account.peak_bytes,
                    managed_bytes=account.managed_peak_bytes,
                    allocations=tuple(EmulatedAllocation(**row) for row in one["allocations"]),
                    growth=tuple(_GrowingMemory(**row) for row in one["growth"]),
                    **{
                        field.name: one[field.name]
                        for field in dataclasses.fields(EmulatedDeviceUse)
                        if field.name in one
                        and field.name not in ("device", "allocations", "growth")
                    },
                )
            )
    return found
