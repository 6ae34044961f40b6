"""Memory and speed as a prediction and a measurement both state them, and their JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak memory of a training step on one GPU, in bytes.

    `device_bytes` is what NVML would show for the process (`peak_reserved_bytes` plus CUDA
    context); `breakdown` splits `device_bytes` by `MemoryCategory` and adds up to it exactly.
    `loaded_bytes` is allocated once model, adapters and optimizer exist and before the first
    step. `paged_bytes` is managed memory of paged optimizers, which torch does not count and
    the driver can move to the host: it is not part of `device_bytes`.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    loaded_bytes: int
    phase_peak_bytes: Mapping[str, int]
    peak_phase: str
    breakdown: Mapping[str, int]
    paged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a configuration trains, at one fixed effective batch.

    `step_s` is one optimizer step (all its micro-steps), `it_per_s` counts micro-steps as
    the progress bars of trainers do, `tokens_per_s` counts tokens that are not padding.
    `mfu` is model FLOPs per second over the GPU's dense peak in the compute precision, with
    recomputation of checkpointed activations not counted; None where the peak is unknown.
    `breakdown_s` splits `step_s` by kind of work and adds up to it.
    """

    step_s: float
    it_per_s: float
    samples_per_s: float
    tokens_per_s: float
    mfu: float | None
    breakdown_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def counts_micro_steps(self) -> bool:
        """Whether `it_per_s` differs from optimizer steps a second.

        It does not where steps have one micro-step, nor where nobody tells of micro-steps: of
        commands and emulated programs only the updates are known.
        """
        return not math.isclose(self.it_per_s * self.step_s, 1, rel_tol=1e-3)


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """One stage of a training that has several: its peak of device memory, and its speed."""

    device_bytes: int
    samples_per_s: float
    step_s: float


def hardest_stage(stages: Mapping[str, StageNumbers]) -> str | None:
    """The stage that needs most memory; None without stages."""
    return max(stages, key=lambda name: stages[name].device_bytes, default=None)


def plain(record: Any) -> dict[str, Any]:
    """A dataclass as nested plain dictionaries (mappings are copied)."""
    return {
        f.name: plain(value) if dataclasses.is_dataclass(value) else _copied(value)
        for f in dataclasses.fields(record)
        for value in (getattr(record, f.name),)
    }


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def build(cls: type[Any], data: Mapping[str, Any]) -> Any:
    """A dataclass of those of its fields that `data` has; what it does not know is left out."""
    return cls(**{f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data})


def scalar_names(cls: type[Any]) -> list[str]:
    """The fields that stand in JSON as they are."""
    nested = {"memory", "speed", "source"}
    return [f.name for f in dataclasses.fields(cls) if f.name not in nested]


def stages_dict(stages: Mapping[str, StageNumbers]) -> dict[str, Any]:
    """The stages as JSON types; nothing where there are none."""
    if not stages:
        return {}
    numbers = {name: dataclasses.asdict(stage) for name, stage in stages.items()}
    return {"limiting_stage": hardest_stage(stages), "stages": numbers}


def read_stages(data: Mapping[str, Any]) -> dict[str, StageNumbers]:
    """The inverse of `stages_dict`."""
    return {name: build(StageNumbers, stage) for name, stage in data.get("stages", {}).items()}
