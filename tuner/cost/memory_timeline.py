"""The memory of one optimizer step over time, by what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.core.records.reading import read, written
from tuner.cost.speed.operators import OperatorTime


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase of the step and when it runs, in seconds from the step's start."""

    phase: str
    micro_step: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Predicted memory at moments of one optimizer step.

    `categories` maps a name of `MemoryCategory` to its allocated bytes at each of `times_s`;
    `reserved_bytes` is what the allocator holds then. Of an optimizer step with many micro-steps
    the first and one further are shown: the others repeat the latter. Managed memory of paged
    optimizers and the CUDA context are in neither.
    """

    times_s: tuple[float, ...]
    categories: Mapping[str, tuple[int, ...]]
    reserved_bytes: tuple[int, ...]
    spans: tuple[PhaseSpan, ...]
    operators: tuple[OperatorTime, ...] = ()
    """Those that take most of the step's time; empty where nobody asked."""

    @property
    def totals(self) -> tuple[int, ...]:
        """Allocated bytes in all, at each moment."""
        return tuple(map(sum, zip(*self.categories.values(), strict=True)))

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "times_s": list(self.times_s),
            "categories": {name: list(sizes) for name, sizes in self.categories.items()},
            "reserved_bytes": list(self.reserved_bytes),
            "spans": [[s.phase, s.micro_step, s.start_s, s.end_s] for s in self.spans],
            "operators": [written(operator) for operator in self.operators],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MemoryTimeline:
        """The inverse of `to_dict`. Raises `KeyError`, `TypeError` or `ValueError`."""
        return cls(
            times_s=tuple(map(float, data["times_s"])),
            categories={str(k): tuple(map(int, v)) for k, v in data["categories"].items()},
            reserved_bytes=tuple(map(int, data["reserved_bytes"])),
            spans=tuple(
                PhaseSpan(str(phase), int(micro_step), float(start), float(end))
                for phase, micro_step, start, end in data["spans"]
            ),
            operators=tuple(read(OperatorTime, each) for each in data.get("operators", ())),
        )
