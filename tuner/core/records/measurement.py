"""What a device said of one configuration, a real one or an emulated one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.core.kinds import Source
from tuner.core.records.numbers import Memory, Speed, StageNumbers, hardest_stage
from tuner.core.records.prediction import stages_dict
from tuner.core.records.reading import Bytes, Count, Ends, Quantity, read, written


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
    """What a device did in one trial. `device` is the exact device name.

    On an emulated device `source` says so: its memory is what a real one would have counted, its
    speed an estimate with `intervals`, as in `Prediction`. Records keep such numbers apart
    (`Outcome.emulation`).

    `steps` are the timed optimizer steps, after `warmup_steps` that were not timed. `memory` is
    of all steps, its `phase_peak_bytes` of the warm-up. Everything with a default of None is
    unknown where it is None: not asked of the device, or the device does not tell.
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
    """Micro-steps of the timed steps together. Where they are fewer than `steps` whole ones have,
    `speed` was put together from micro-steps and updates, and a note says so."""
    first_step_s: Quantity | None = None
    """The first optimizer step, of two micro-steps at most: kernels are loaded or compiled and
    optimizer state is made."""
    samples_per_s_interval: Ends | None = None
    """95 % confidence interval of the mean rate over the timed steps."""
    stopped_by: str | None = None
    """What ended the timed steps: "interval" (narrow enough), "budget", "loss", or, before
    that, "memory" (beyond what may be recommended) or "dominated" (surely slower than a trial
    that takes no more memory)."""
    evaluation_peak_bytes: Bytes | None = None
    checkpoint_bytes: Bytes | None = None
    """Of a verification: the peak allocated while it evaluated and saved, and the size saved."""
    padded_tokens_per_s: Quantity | None = None
    """Tokens a second with padding counted; `speed.tokens_per_s` counts none."""
    data_wait_fraction: Quantity | None = None
    """Share of the timed steps in which the training process waited for its next batch."""
    num_alloc_retries: Count | None = None
    """How often PyTorch's allocator had to give cached blocks back to find memory."""
    timed_alloc_retries: Count | None = None
    """How many of these were in the timed steps, after caches had filled."""
    nvml_process_bytes: Bytes | None = None
    nvml_device_bytes: Bytes | None = None
    """Device memory in use by this process, and by all, as the driver counts it."""
    gpu_utilization: Quantity | None = None
    """Share of time in which a kernel ran, 0 to 1, as the driver counts it."""
    power_w: Quantity | None = None
    energy_j_per_sample: Quantity | None = None
    energy_source: str | None = None
    """"counter" (the driver's energy counter) or "sampled power"."""
    memory_limit_bytes: Bytes | None = None
    """What the trial was allowed where a larger device stood in for a smaller one."""
    weights: str | None = None
    """"synthetic", or the checkpoint that was trained."""
    lengths: str | None = None
    """"full" where every sequence had the longest length, "data" where they had the data's."""
    cpu_threads: Count | None = None
    notes: tuple[str, ...] = ()
    """What a reader should know, such as a knob that cannot act on this model."""
    stages: Mapping[str, StageNumbers] = field(default_factory=dict)
    """Each stage, as in `Prediction`: `memory` is that of the one that needs most."""
    ranks: tuple[RankMemory, ...] = ()
    """Each rank of a trial on several GPUs, in their order; `memory` is that of the one that
    needed most, `speed` that of all together. Empty for a trial on one GPU."""
    intervals: Mapping[str, Ends] = field(default_factory=dict)
    """Lower and upper end of 90 % intervals of what an emulated device estimates, by the names of
    `Prediction.intervals`; empty for a real device."""

    @property
    def limiting_stage(self) -> str | None:
        """The stage that needed most memory; None where there are no stages."""
        return hardest_stage(self.stages)

    def to_dict(self) -> dict[str, Any]:
        """One flat JSON object, shaped as `Prediction.to_dict`."""
        data = written(self)
        speed, stages = data.pop("speed"), data.pop("stages")
        rare = {name: data.pop(name) for name in ("ranks", "intervals")}
        return {
            **data,
            **speed,
            **stages_dict(stages, self.limiting_stage),
            **{name: value for name, value in rare.items() if value},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_dict`; what older versions did not write has its default.

        Raises ValueError when malformed.
        """
        return read(cls, {**data, "speed": data})
