"""Prediction error over the trials that were both predicted and measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tuner.core.records import Measurement, Prediction, Source, Status, TrialRecord

Evidence = Prediction | Measurement


class Quantity(NamedTuple):
    """A number that is both predicted and measured. `name` is that of its interval, too."""

    name: str
    label: str
    value: Callable[[Evidence], float]


QUANTITIES = (
    Quantity("device_bytes", "device memory", lambda e: e.memory.device_bytes),
    Quantity("peak_allocated_bytes", "peak allocated", lambda e: e.memory.peak_allocated_bytes),
    Quantity("step_s", "optimizer step", lambda e: e.speed.step_s),
)

Pair = tuple[Prediction, Measurement]
"""One trial that was predicted beforehand and measured to its end."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Predicted verdicts against measured ones: numbers of measured trials.

    `too_large` were predicted to fit and did not, `too_small` not to fit and did.
    """

    right: int
    too_large: int
    too_small: int

    @property
    def count(self) -> int:
        """Measured trials that tell whether the prediction was right."""
        return self.right + self.too_large + self.too_small


def pairs(records: Iterable[TrialRecord]) -> list[Pair]:
    """The trials that were predicted and measured, in their order."""
    return [
        (prediction, measurement)
        for record in records
        if record.outcome.status is Status.OK
        and (prediction := record.outcome.prediction) is not None
        and (measurement := record.outcome.measurement) is not None
        and all(quantity.value(measurement) > 0 for quantity in QUANTITIES)
    ]


def verdicts(records: Iterable[TrialRecord]) -> Verdicts:
    """The share of right "fits" verdicts, over measured trials that fitted or ran out of memory."""
    counts: dict[tuple[bool, bool], int] = {}
    for record in records:
        prediction, status = record.outcome.prediction, record.outcome.status
        ended = status in (Status.OK, Status.OOM)
        if record.source is Source.MEASURED and prediction is not None and ended:
            # A trial that ended, in more memory than was to be used, does not fit either.
            said = (prediction.fits, record.fits)
            counts[said] = counts.get(said, 0) + 1
    return Verdicts(
        right=counts.get((True, True), 0) + counts.get((False, False), 0),
        too_large=counts.get((True, False), 0),
        too_small=counts.get((False, True), 0),
    )


def prediction_error_rows(found: Sequence[Pair]) -> list[Mapping[str, str]]:
    """Predicted over measured: a row for each quantity, in words; empty without trials."""
    rows: list[Mapping[str, str]] = []
    for quantity in QUANTITIES if found else ():
        ratios = [quantity.value(said) / quantity.value(seen) for said, seen in found]
        within = [
            ends[0] <= quantity.value(seen) <= ends[1]
            for said, seen in found
            if (ends := said.intervals.get(quantity.name)) is not None
        ]
        rows.append(
            {
                "predicted / measured": quantity.label,
                "median": f"{statistics.median(ratios):.3f}",
                "range": f"{min(ratios):.3f} to {max(ratios):.3f}",
                "mean error": f"{statistics.fmean(abs(ratio - 1) for ratio in ratios):.1%}",
                "in 90 % interval": f"{sum(within) / len(within):.0%}" if within else "?",
            }
        )
    return rows


def verdict_text(found: Verdicts) -> str:
    """`verdicts` in words; empty when there is nothing to say."""
    if not found.count:
        return ""
    text = f"whether it fits was predicted correctly for {found.right} of {found.count} trials"
    if found.too_large:
        text += f"; {found.too_large} did not fit, contrary to the prediction"
    if found.too_small:
        text += f"; {found.too_small} fitted, contrary to the prediction"
    return text
