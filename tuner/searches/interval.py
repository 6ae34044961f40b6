"""Where a number lies: the interval around a prediction, or a mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tuner.core.units import format_range

PREDICTED_PERCENT = 90
"""Of runs that lie within the interval of a prediction (see docs/accuracy_coverage.md)."""
MEASURED_PERCENT = 95
"""Confidence of the interval of the mean rate over the timed steps of one trial."""


@dataclass(frozen=True, slots=True)
class ShownInterval:
    """Where a number lies in `percent` of 100 cases."""

    low: float
    high: float
    percent: int

    def text(self, shown: Callable[[float], str]) -> str:
        """For people: "90 %: 0.21 to 0.33"."""
        return f"{self.percent} %: {format_range(self.low, self.high, shown)}"

    def to_dict(self) -> dict[str, float | int]:
        """JSON types."""
        return {"low": rounded(self.low), "high": rounded(self.high), "percent": self.percent}


def interval_dict(name: str, interval: ShownInterval | None) -> dict[str, Any]:
    """The interval under a key of its own; nothing where there is none."""
    return {f"{name}_interval": interval.to_dict()} if interval else {}


def rounded(value: float) -> float:
    """Six significant digits: more would claim an accuracy that no prediction has."""
    return float(f"{value:.6g}")
