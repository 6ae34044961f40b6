"""The largest allocations at the peak of a training step, and where they come from."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from tuner.cost.memory import category_of, live_at_peak
from tuner.cost.operators.timeline import Timeline

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class PeakAllocation:
    """`count` allocations of `size_bytes` each that are alike.

    `place` is the parameter, or the module in whose forward it was made, with * for the numbers
    of layers; empty for what a backward pass or an optimizer made. `made_by` is the operator,
    empty for weights as they were loaded. `phase` is when it was made.
    """

    size_bytes: int
    count: int
    category: str
    phase: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    made_by: str = ""
    place: str = ""

    @property
    def total_bytes(self) -> int:
        """All of them together."""
        return self.size_bytes * self.count

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "size_bytes": self.size_bytes,
            "count": self.count,
            "total_bytes": self.total_bytes,
            "category": self.category,
            "phase": self.phase,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "made_by": self.made_by,
            "place": self.place,
        }


def largest_allocations(timeline: Timeline, *, number: int = 8) -> list[PeakAllocation]:
    """The `number` largest kinds of allocations at the peak, the largest single one first."""
    alike = Counter(
        PeakAllocation(
            size_bytes=block.size_bytes,
            count=1,
            category=str(category_of(block)),
            phase=str(block.born_phase),
            shape=block.shape,
            dtype=str(block.dtype).removeprefix("torch.") if block.dtype is not None else "",
            made_by=block.made_by,
            place=_LAYER_NUMBER.sub("*", block.place),
        )
        for block in live_at_peak(timeline)
    )
    kinds = sorted(alike.items(), key=lambda kind: (-kind[0].size_bytes, -kind[1]))
    return [_times(kind, count) for kind, count in kinds[:number]]


def _times(kind: PeakAllocation, count: int) -> PeakAllocation:
    return replace(kind, count=count)
