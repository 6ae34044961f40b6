"""What is not worth a trial because its memory cannot fit: who says so, and since when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.core.records import Prediction, TrialRecord
from tuner.cost.calibration.calibrate import calibrations_from
from tuner.searches.candidates import Candidates
from tuner.searches.oom_frontier import OomFrontier
from tuner.searches.pruned import Pruned

MOST_RISK = 0.5
"""Probability of not fitting above which nothing is tried. Samplers that know nothing of memory
are kept from what will rather fail; "guided" has a narrower limit of its own."""

REFIT_GROWTH = 0.05
"""The calibration is repeated when the trials are this share more than the last time."""

KNOWN_OOM, RISK, FAILS = 1, 2, 3
"""Why a configuration is held back; 0 where it is not."""


class CalibratedRisk:
    """The probability that each candidate does not fit, by predictions that trials correct."""

    def __init__(self, predictions: Sequence[Prediction]) -> None:
        self._predictions = predictions
        self._records: list[TrialRecord] = []
        self._fitted = -1
        self._risk = np.zeros(0)

    def tell(self, record: TrialRecord) -> None:
        """Take a trial into account."""
        self._records.append(record)

    def risk(self) -> NDArray[np.float64]:
        """Shape (candidates,); learned anew when there are enough new trials to change it."""
        if len(self._records) > self._fitted * (1 + REFIT_GROWTH):
            space = self._records[-1].space if self._records else ""
            calibrations = calibrations_from(self._records)
            fitting = calibrations.probabilities_of_fitting(self._predictions, space)
            self._risk = 1.0 - fitting
            self._fitted = len(self._records)
        return self._risk


class PruningLog:
    """What is held back at present, and the history of it."""

    def __init__(self, candidates: Candidates, frontier: OomFrontier) -> None:
        self._candidates, self._frontier = candidates, frontier
        self._cause = np.zeros(len(candidates), dtype=np.int8)
        self._now: dict[int, Pruned] = {}
        self._revived: list[Pruned] = []

    @property
    def entries(self) -> tuple[Pruned, ...]:
        """What was revived, then what is held back now."""
        return (*self._revived, *(self._now[place] for place in sorted(self._now)))

    def reasons(self) -> dict[str, str]:
        """What is held back now, by key."""
        return {entry.configuration.key: entry.reason for entry in self._now.values()}

    def update(
        self,
        risk: NDArray[np.float64] | None,
        most_risk: float,
        trial_id: str | None,
        closed: Mapping[str, NDArray[np.bool_]],
    ) -> NDArray[np.bool_]:
        """Judge anew after a trial; returns which candidates are held back, tried or not.

        `closed` are those that would fail for another reason than memory, by that reason.
        """
        cause = np.zeros(len(self._cause), dtype=np.int8)
        if risk is not None:
            cause[risk > most_risk] = RISK
        cause[self._frontier.covered()] = KNOWN_OOM
        for mask in closed.values():
            cause[mask] = FAILS
        for place in np.flatnonzero(cause != self._cause).tolist():
            before = self._now.pop(place, None)
            configuration = self._candidates.configurations[place]
            if not self._candidates.is_left(place):
                continue
            if cause[place]:
                why = next((why for why, mask in closed.items() if mask[place]), None)
                reason = why or self._reason(place, None if risk is None else float(risk[place]))
                self._now[place] = Pruned(configuration, reason, trial_id)
            elif before is not None:
                self._revived.append(
                    Pruned(configuration, before.reason, before.since, revived_by=trial_id)
                )
        self._cause = cause
        return cause > 0

    def _reason(self, place: int, risk: float | None) -> str:
        witness = self._frontier.witness(place)
        if witness is not None:
            return f"takes no less memory than {self._candidates.describe(witness)}, which ran out"
        assert risk is not None
        return f"runs out of memory with a probability of {100 * risk:.0f} %"
