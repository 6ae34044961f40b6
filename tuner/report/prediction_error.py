"""Prediction error over the trials that were both predicted and measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tuner.core.records import Measurement, Prediction, Source, Status, TrialRecord

Evidence = Prediction | Measurement


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number that is both predicted and measured. `name` is that of its interval, too."""

    name: str
    label: str
    value: Callable[[Evidence], float]


QUANTITIES = (
    Quantity("device_bytes", "device memory", lambda e: e.memory.device_bytes),
    Quantity("peak_allocated_bytes", "peak allocated", lambda e: e.memory.peak_allocated_bytes),
    Quantity("step_s", "optimizer step", lambda e: e.speed.step_s),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """One trial that was predicted beforehand and measured to its end."""

    predicted: Prediction
    measured: Measurement

    def ratio(self, quantity: Quantity) -> float:
        """Predicted over measured: 1.1 is a prediction that is 10 % too high."""
        return quantity.value(self.predicted) / quantity.value(self.measured)

    def is_covered(self, quantity: Quantity) -> bool | None:
        """True when the prediction's 90 % interval holds the measured value; None without one."""
        ends = self.predicted.intervals.get(quantity.name)
        return None if ends is None else ends[0] <= quantity.value(self.measured) <= ends[1]


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Predicted over measured for one quantity, over `count` trials.

    `mean_error` is the mean of |ratio - 1|; `covered` the share of measured values inside the
    prediction's 90 % interval, None where predictions have none.
    """

    quantity: Quantity
    count: int
    median_ratio: float
    lowest_ratio: float
    highest_ratio: float
    mean_error: float
    covered: float | None


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Predicted verdicts against measured ones: numbers of measured trials.

    `too_large` were predicted to fit and did not, `too_small` the other way round.
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
        Pair(prediction, measurement)
        for record in records
        if record.outcome.status is Status.OK
        and (prediction := record.outcome.prediction) is not None
        and (measurement := record.outcome.measurement) is not None
        and all(quantity.value(measurement) > 0 for quantity in QUANTITIES)
    ]


def prediction_errors(found: Sequence[Pair]) -> list[PredictionError]:
    """One for each quantity; empty without trials."""
    return [_error_of(found, quantity) for quantity in QUANTITIES] if found else []


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


def _error_of(found: Sequence[Pair], quantity: Quantity) -> PredictionError:
    ratios = [pair.ratio(quantity) for pair in found]
    covered = [c for pair in found if (c := pair.is_covered(quantity)) is not None]
    return PredictionError(
        quantity=quantity,
        count=len(ratios),
        median_ratio=statistics.median(ratios),
        lowest_ratio=min(ratios),
        highest_ratio=max(ratios),
        mean_error=statistics.fmean(abs(ratio - 1) for ratio in ratios),
        covered=sum(covered) / len(covered) if covered else None,
    )


def prediction_error_rows(found: Sequence[Pair]) -> list[Mapping[str, str]]:
    """`prediction_errors` in words, for tables: one row for each quantity, with the same keys."""
    return [
        {
            "predicted / measured": error.quantity.label,
            "median": f"{error.median_ratio:.3f}",
            "range": f"{error.lowest_ratio:.3f} to {error.highest_ratio:.3f}",
            "mean error": f"{error.mean_error:.1%}",
            "in 90 % interval": "?" if error.covered is None else f"{error.covered:.0%}",
        }
        for error in prediction_errors(found)
    ]


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
