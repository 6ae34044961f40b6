"""Configurations held back because their memory cannot fit: why, and since when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.core.records import Configuration, Prediction, TrialRecord
from tuner.core.setup.schemas import MemoryOrder
from tuner.cost.calibrate import calibrations_from
from tuner.searches.candidates import Candidates
from tuner.searches.request import Pruned

Places = NDArray[np.intp]


class OomFrontier:
    """What is known not to fit among configurations, by those that ran out of memory.

    A configuration is covered when a known one that ran out is nowhere larger, in the knobs that
    the workload declares monotone, and equal in all others. Sound where that declaration is.
    """

    def __init__(self, configurations: Sequence[Configuration], order: MemoryOrder) -> None:
        parts = [order.split(configuration) for configuration in configurations]
        names = sorted({name for places, _ in parts for name in places})
        # A knob that has no place here is among the others there, and keeps the two apart.
        self._places = np.array(
            [[places.get(name, 0.0) for name in names] for places, _ in parts]
        ).reshape(len(parts), len(names))
        groups: dict[object, int] = {}
        self._group = np.array(
            [groups.setdefault(others, len(groups)) for _, others in parts], dtype=np.intp
        )
        by_group = np.argsort(self._group, kind="stable")
        ends = np.cumsum(np.bincount(self._group, minlength=len(groups)))
        self._members = np.split(by_group, ends[:-1])
        self._known: dict[int, Places] = {}
        """The smallest that ran out, each with all that are at least as large."""
        self._covering = np.zeros(len(parts), dtype=np.intp)
        """How many known ones cover each. Kept up to date, so that a thousand trials in a row that
        run out of memory cost no more each than the first did."""

    @property
    def known(self) -> tuple[int, ...]:
        """Places of the smallest that ran out of memory; none of them covers another."""
        return tuple(self._known)

    def ran_out(self, place: int) -> None:
        """The configuration at `place` ran out of memory."""
        if self._covering[place]:
            return
        larger = self._at_least(place)
        for other in [other for other in larger.tolist() if other in self._known]:
            self._forget(other)
        self._known[place] = larger
        self._covering[larger] += 1

    def fitted(self, place: int) -> None:
        """The configuration at `place` fitted.

        What ran out and is no larger did so for another reason (a process beside it, for
        example), and no longer counts.
        """
        for other in self._witnesses(place):
            self._forget(other)

    def covered(self) -> NDArray[np.bool_]:
        """Which configurations cannot fit, shape (configurations,)."""
        return self._covering > 0

    def witness(self, place: int) -> int | None:
        """A known one because of which `place` cannot fit; None when there is none."""
        return next(iter(self._witnesses(place)), None)

    def _witnesses(self, place: int) -> list[int]:
        if not self._covering[place]:
            return []
        return [known for known, larger in self._known.items() if place in larger]

    def _forget(self, known: int) -> None:
        self._covering[self._known.pop(known)] -= 1

    def _at_least(self, place: int) -> Places:
        """Those that are at least as large as the one at `place`, itself included."""
        members = self._members[self._group[place]]
        larger: Places = members[(self._places[members] >= self._places[place]).all(axis=1)]
        return larger


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
