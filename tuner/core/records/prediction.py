"""What a model of a GPU says of one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.core.kinds import Source
from tuner.core.records.budget import MemoryBudget
from tuner.core.records.numbers import Memory, Speed, StageNumbers, hardest_stage
from tuner.core.records.reading import Bytes, Count, Ends, Quantity, read, written


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model of the GPU says of one configuration; nothing here was measured.

    `fits` is decided on `memory.device_bytes` by the `budget`. Of a training in `stages` the memory
    is that of the stage that needs most, and the speed that of all of them, one after another.
    """

    fits: bool
    limit_bytes: Bytes
    margin_bytes: Bytes
    memory: Memory
    speed: Speed
    trainable_params: Count
    total_params: Count
    gpu: str
    method: str
    """How it was predicted, for example "trace of two optimizer steps, full depth"."""
    source: Source = Source.PREDICTED
    intervals: Mapping[str, Ends] = field(default_factory=dict)
    """Lower and upper end of 90 % intervals, of `device_bytes`, `peak_reserved_bytes`,
    `peak_allocated_bytes`, `step_s` and `tokens_per_s`. Empty in records of older versions."""
    corrections: Mapping[str, Quantity] = field(default_factory=dict)
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
        data = written(self)
        speed, stages = data.pop("speed"), data.pop("stages")
        return {**data, **speed, **stages_dict(stages, self.limiting_stage)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prediction:
        """The inverse of `to_dict`. Raises ValueError when malformed."""
        return read(cls, {**data, "speed": data})


def stages_dict(stages: Mapping[str, Any], limiting: str | None) -> dict[str, Any]:
    """What a JSON object says of stages; nothing where there are none."""
    return {"limiting_stage": limiting, "stages": stages} if stages else {}
