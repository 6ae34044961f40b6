"""What a model of a GPU says of one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.records.budget import MemoryBudget
from tuner.records.kinds import Source
from tuner.records.numbers import (
    Memory,
    Speed,
    StageNumbers,
    build,
    hardest_stage,
    plain,
    read_stages,
    scalar_names,
    stages_dict,
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model of the GPU says of one configuration; nothing here was measured.

    `fits` is decided on `memory.device_bytes` by the `budget`. Of a training in `stages` the memory
    is that of the stage that needs most, and the speed that of all of them, one after another.
    """

    fits: bool
    limit_bytes: int
    margin_bytes: int
    memory: Memory
    speed: Speed
    trainable_params: int
    total_params: int
    gpu: str
    method: str
    """How it was predicted, for example "trace of two optimizer steps, full depth"."""
    source: Source = Source.PREDICTED
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Lower and upper end of 90 % intervals, of `device_bytes`, `peak_reserved_bytes`,
    `peak_allocated_bytes`, `step_s` and `tokens_per_s`. Empty in records of older versions."""
    corrections: Mapping[str, float] = field(default_factory=dict)
    """The factor that measured trials put on a quantity, of those named in `intervals`; the
    model of the GPU alone said the quantity divided by it. Empty without such trials."""
    stages: Mapping[str, StageNumbers] = field(default_factory=dict)
    """Each stage, of a training that has some; empty otherwise."""

    @property
    def budget(self) -> MemoryBudget:
        """The memory of a rank, and what of it is to stay free."""
        return MemoryBudget(self.limit_bytes, self.margin_bytes)

    @property
    def limiting_stage(self) -> str | None:
        """The stage that needs most memory; None where there are no stages."""
        return hardest_stage(self.stages)

    def to_dict(self) -> dict[str, Any]:
        """One flat JSON object; the keys that scripts read are part of the contract."""
        data = plain(self)
        speed = data.pop("speed")
        del data["stages"]
        intervals = {name: list(ends) for name, ends in self.intervals.items()}
        return {
            **data,
            **speed,
            "source": str(self.source),
            "intervals": intervals,
            **stages_dict(self.stages),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prediction:
        """The inverse of `to_dict`; keys that are not known are ignored."""
        added_later = {"intervals", "corrections", "stages"}
        intervals = data.get("intervals", {})
        return cls(
            memory=build(Memory, data["memory"]),
            speed=build(Speed, data),
            source=Source(data["source"]),
            intervals={name: tuple(ends) for name, ends in intervals.items()},
            corrections=data.get("corrections", {}),
            stages=read_stages(data),
            **{k: data[k] for k in scalar_names(cls) if k not in added_later},
        )
