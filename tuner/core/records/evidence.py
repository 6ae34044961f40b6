"""The memory and speed of one configuration: predicted, emulated or measured.

Both carriers write one flat JSON object, whose names scripts and journals rely on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from tuner.core.errors import InputError
from tuner.core.gpu import Gpu
from tuner.core.kinds import Source, Verdict
from tuner.core.records.reading import Bytes, Count, Ends, Quantity, read, written
from tuner.core.units import parse_bytes

DEFAULT_MARGIN_FRACTION = 0.03
"""Part of the GPU's memory to keep free: reserved memory differed by up to 11.7 % between two
identical published runs, and drivers and displays take their share."""

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """`limit_bytes` of memory, of which `margin_bytes` stay free."""

    limit_bytes: Bytes
    margin_bytes: Bytes = 0

    @classmethod
    def of(cls, limit_bytes: int, margin_fraction: float | None = None) -> MemoryBudget:
        """The budget with a margin of this fraction, or of the default one."""
        fraction = DEFAULT_MARGIN_FRACTION if margin_fraction is None else margin_fraction
        return cls(limit_bytes, round(limit_bytes * fraction))

    @property
    def usable_bytes(self) -> int:
        """The memory without the margin."""
        return self.limit_bytes - self.margin_bytes

    def fits(self, used_bytes: float) -> bool:
        """Judge an amount of memory: True when it leaves the margin free."""
        return used_bytes <= self.usable_bytes

    def verdict(self, used_bytes: float, ends: Ends | None = None) -> Verdict:
        """The verdict in a word; `ends` are those of the interval around an estimate."""
        low, high = ends or (used_bytes, used_bytes)
        if low > self.limit_bytes:
            return Verdict.DOES_NOT_FIT
        if self.fits(used_bytes) and high <= self.limit_bytes:
            return Verdict.FITS
        return Verdict.TIGHT


def parse_margin(text: str | None, gpu: Gpu) -> float | None:
    """Read a headroom such as "3%" or "2GiB" as a fraction of the memory of `gpu`; None for None.

    Raises `InputError` for a number without unit (3 could be 3 % or 0.03) and for all the memory.
    """
    if text is None:
        return None
    percent = _PERCENT.fullmatch(text)
    try:
        if percent:
            fraction = float(percent.group(1)) / 100
        else:
            fraction = parse_bytes(text) / gpu.memory_bytes
    except InputError:
        raise InputError(
            f"headroom {text!r} is not a share of the memory", hint="write for example 3% or 2GiB"
        ) from None
    if fraction >= 1:
        text = f"headroom {text!r} leaves nothing of the memory of {gpu.name}"
        raise InputError(text, hint="write for example 3% or 2GiB")
    return fraction


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak memory of a training step on one GPU, in bytes.

    `device_bytes` is what NVML would show for the process (`peak_reserved_bytes` plus CUDA
    context); `breakdown` splits `device_bytes` by `MemoryCategory` and adds up to it exactly.
    `loaded_bytes` is allocated once model, adapters and optimizer exist and before the first
    step. `paged_bytes` is managed memory of paged optimizers, which torch does not count and
    the driver can move to the host: it is not part of `device_bytes`.
    """

    peak_allocated_bytes: Bytes
    peak_reserved_bytes: Bytes
    device_bytes: Bytes
    loaded_bytes: Bytes
    phase_peak_bytes: Mapping[str, Bytes]
    peak_phase: str
    breakdown: Mapping[str, Bytes]
    paged_bytes: Bytes = 0

    @property
    def free_bytes(self) -> int:
        """Memory of blocks that PyTorch keeps and nothing is in."""
        return self.peak_reserved_bytes - self.peak_allocated_bytes


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a configuration, at one fixed effective batch.

    `step_s` is one optimizer step (all its micro-steps), `it_per_s` counts micro-steps as
    the progress bars of trainers do, `tokens_per_s` counts tokens that are not padding.
    `mfu` is model FLOPs per second over the GPU's dense peak in the compute precision, with
    recomputation of checkpointed activations not counted; None where the peak is unknown.
    `breakdown_s` splits `step_s` by kind of work and adds up to it.
    """

    step_s: Quantity
    it_per_s: Quantity
    samples_per_s: Quantity
    tokens_per_s: Quantity
    mfu: Quantity | None
    breakdown_s: Mapping[str, Quantity] = field(default_factory=dict)

    def slowed(self, factor: float) -> Speed:
        """The speed where every step takes `factor` times as long."""
        return Speed(
            step_s=self.step_s * factor,
            it_per_s=self.it_per_s / factor,
            samples_per_s=self.samples_per_s / factor,
            tokens_per_s=self.tokens_per_s / factor,
            mfu=None if self.mfu is None else self.mfu / factor,
            breakdown_s={kind: seconds * factor for kind, seconds in self.breakdown_s.items()},
        )

    @property
    def updating_s(self) -> float:
        """The time of the optimizer in a step, which accumulation does not repeat."""
        return self.breakdown_s.get("optimizer", 0.0)

    @property
    def counts_micro_steps(self) -> bool:
        """True if `it_per_s` differs from optimizer steps per second.

        Commands and emulated programs report optimizer steps only.
        """
        return not math.isclose(self.it_per_s * self.step_s, 1, rel_tol=1e-3)


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """One stage of a training that has several: its peak of device memory, and its speed."""

    device_bytes: Bytes
    samples_per_s: Quantity
    step_s: Quantity


def most_known(values: Iterable[int | None]) -> int | None:
    """The largest of the numbers that are known; None without one."""
    return max((value for value in values if value is not None), default=None)


def hardest_stage(stages: Mapping[str, StageNumbers]) -> str | None:
    """The stage that needs the most memory; None without stages."""
    return max(stages, key=lambda name: stages[name].device_bytes, default=None)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One configuration by a model of the GPU; nothing here was measured.

    `budget` is the memory of one rank. For a training in `stages`, `memory` belongs to the stage
    that needs most, and `speed` to all of them, one after another.
    """

    budget: MemoryBudget
    memory: Memory
    speed: Speed
    trainable_params: Count
    total_params: Count
    gpu: str
    method: str
    """The method, for example "trace of two optimizer steps, full depth"."""
    source: Source = Source.PREDICTED
    intervals: Mapping[str, Ends] = field(default_factory=dict)
    """Lower and upper end of 90 % intervals, of `device_bytes`, `peak_reserved_bytes`,
    `peak_allocated_bytes`, `step_s` and `tokens_per_s`. Empty in records of older versions."""
    corrections: Mapping[str, Quantity] = field(default_factory=dict)
    """Factors from measured trials on the quantities of `intervals`, already multiplied in."""
    stages: Mapping[str, StageNumbers] = field(default_factory=dict)
    """Numbers of each stage of the training; empty for a training without stages."""
    ranks: ClassVar[tuple[RankMemory, ...]] = ()
    """All ranks take the same."""

    @property
    def fits(self) -> bool:
        """The verdict of the budget on `memory.device_bytes`."""
        return self.budget.fits(self.memory.device_bytes)

    @property
    def verdict(self) -> Verdict:
        """The verdict with the interval; `fits` says which way it is more likely to go."""
        if self.is_compiled and not self.fits:
            return Verdict.UNKNOWN
        return self.budget.verdict(self.memory.device_bytes, self.intervals.get("device_bytes"))

    @property
    def is_compiled(self) -> bool:
        """True under torch.compile, which isn't modelled.

        Memory and speed are those without it: an upper bound, and no speed of this training.
        """
        return "torch_compile" in self.method

    @property
    def limiting_stage(self) -> str | None:
        """The stage that needs the most memory; None without stages."""
        return hardest_stage(self.stages)

    def to_dict(self) -> dict[str, Any]:
        """One flat JSON object; the keys that scripts read are part of the contract."""
        data = written(self)
        budget, speed, stages = (data.pop(name) for name in ("budget", "speed", "stages"))
        stages = _stages_dict(stages, self.limiting_stage)
        return {"fits": self.fits, **budget, **data, **speed, **stages}

    def to_answer(self) -> dict[str, Any]:
        """As `to_dict`, with null for a speed that isn't known."""
        data = self.to_dict()
        return {**data, **dict.fromkeys(written(self.speed))} if self.is_compiled else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prediction:
        """The inverse of `to_dict`. Raises ValueError when malformed."""
        return read(cls, {**data, "budget": data, "speed": data})


def _stages_dict(stages: Mapping[str, Any], limiting: str | None) -> dict[str, Any]:
    return {"limiting_stage": limiting, "stages": stages} if stages else {}


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak memory of one rank of a trial on several GPUs, in bytes, as in `Memory`."""

    peak_allocated_bytes: Bytes
    peak_reserved_bytes: Bytes
    device_bytes: Bytes

    @classmethod
    def of(cls, memory: Memory) -> RankMemory:
        """The peaks of a rank's memory."""
        return cls(memory.peak_allocated_bytes, memory.peak_reserved_bytes, memory.device_bytes)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One trial on a real or an emulated device, whose exact name is `device`.

    An emulated device counts memory as a real one would; its speed is an estimate with
    `intervals`, as in `Prediction`. Records keep such numbers apart (`Outcome.emulation`).

    `steps` are the timed optimizer steps, after `warmup_steps` that were not timed. `memory`
    covers all steps, its `phase_peak_bytes` the warm-up. None means unknown.
    """

    memory: Memory
    speed: Speed
    trainable_params: Count
    total_params: Count
    device: str
    steps: Count
    loss_finite: bool
    source: Source = Source.MEASURED
    warmup_steps: Count | None = None
    load_s: Quantity | None = None
    """From the first touch of the device until model, adapters and optimizer exist."""
    timed_micro_steps: Count | None = None
    """Micro-steps of all timed steps. If `steps` whole ones have more, `speed` was extrapolated
    from micro-steps and updates, and a note says so."""
    first_step_s: Quantity | None = None
    """The first optimizer step, of two micro-steps at most: kernels are loaded or compiled and
    optimizer state is made."""
    samples_per_s_interval: Ends | None = None
    """95 % confidence interval of the mean rate over the timed steps."""
    stopped_by: str | None = None
    """The reason for the end of the timed steps: "interval" (narrow enough), "budget", "loss",
    "memory" (too much to recommend) or "dominated" (by a trial with no more memory)."""
    evaluation_peak_bytes: Bytes | None = None
    checkpoint_bytes: Bytes | None = None
    """Verifications only: the peak allocated during evaluation and saving, and the size saved."""
    padded_tokens_per_s: Quantity | None = None
    """Tokens a second with padding counted; `speed.tokens_per_s` counts none."""
    data_wait_fraction: Quantity | None = None
    """Share of the timed steps in which the training process waited for its next batch."""
    num_alloc_retries: Count | None = None
    """Number of times PyTorch's allocator gave cached blocks back to find memory."""
    timed_alloc_retries: Count | None = None
    """Retries in the timed steps, after caches had filled."""
    nvml_process_bytes: Bytes | None = None
    nvml_device_bytes: Bytes | None = None
    """Device memory of this process, and of all processes, as the driver counts it."""
    gpu_utilization: Quantity | None = None
    """Share of time in which a kernel ran, 0 to 1, as the driver counts it."""
    memory_limit_bytes: Bytes | None = None
    """The limit of the trial on a larger device that stood in for a smaller one."""
    weights: str | None = None
    """"synthetic", or the checkpoint that was trained."""
    lengths: str | None = None
    """"full" if every sequence had the longest length, "data" for the lengths of the data."""
    cpu_threads: Count | None = None
    notes: tuple[str, ...] = ()
    """Notes for readers, such as a knob without effect on this model."""
    stages: Mapping[str, StageNumbers] = field(default_factory=dict)
    """Numbers of each stage, as in `Prediction`."""
    ranks: tuple[RankMemory, ...] = ()
    """Ranks of a trial on several GPUs: `memory` is the largest, `speed` that of all together."""
    intervals: Mapping[str, Ends] = field(default_factory=dict)
    """90 % intervals of an emulated device's estimates, by the names of `Prediction.intervals`."""

    is_compiled: ClassVar[bool] = False
    """A measurement is of what ran, under torch.compile too."""
    method: ClassVar[str] = ""

    @property
    def limiting_stage(self) -> str | None:
        """The stage that needed the most memory; None without stages."""
        return hardest_stage(self.stages)

    def to_dict(self) -> dict[str, Any]:
        """One flat JSON object, shaped as `Prediction.to_dict`."""
        data = written(self)
        speed, stages = data.pop("speed"), data.pop("stages")
        rare = {name: data.pop(name) for name in ("ranks", "intervals")}
        return {
            **data,
            **speed,
            **_stages_dict(stages, self.limiting_stage),
            **{name: value for name, value in rare.items() if value},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_dict`; fields that older versions did not write have their default.

        Raises ValueError when malformed.
        """
        return read(cls, {**data, "speed": data})


@dataclass(frozen=True, slots=True)
class RunTime:
    """The time of the whole training, or of an epoch where the number of epochs is not known.

    Saving and loading are not in it, nor is an evaluation of a program that says nothing of their
    number.
    """

    steps: int
    evaluations: int
    is_whole: bool
    seconds: float
    interval_s: tuple[float, float]

    def slowed(self, factor: float) -> RunTime:
        """The time where every step takes `factor` times as long."""
        low_s, high_s = self.interval_s
        ends_s = (low_s * factor, high_s * factor)
        return replace(self, seconds=self.seconds * factor, interval_s=ends_s)
