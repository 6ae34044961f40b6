"""Configurations held back because they cannot fit or would fail: why, and since which trial."""

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
    """Configurations that are known not to fit, because a smaller one ran out of memory.

    A configuration is covered by a known one that ran out if that one is not larger in any knob
    that the workload declares monotone and is equal in all others. This is as sound as that
    declaration.
    """

    def __init__(self, configurations: Sequence[Configuration], order: MemoryOrder) -> None:
        parts = [order.split(configuration) for configuration in configurations]
        names = sorted({name for places, _ in parts for name in places})
        # A knob without a place is in the `others` of the configuration, hence in another group.
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
        """The smallest configurations that ran out, each with all that are at least as large."""
        self._covering = np.zeros(len(parts), dtype=np.intp)
        """Number of known ones that cover each configuration. It is updated with each trial, so
        that the thousandth trial that runs out of memory costs no more than the first."""

    @property
    def known(self) -> tuple[int, ...]:
        """Places of the smallest configurations that ran out; none of them covers another."""
        return tuple(self._known)

    def ran_out(self, place: int) -> None:
        """Note that the configuration at `place` ran out of memory."""
        if self._covering[place]:
            return
        larger = self._at_least(place)
        for other in [other for other in larger.tolist() if other in self._known]:
            self._forget(other)
        self._known[place] = larger
        self._covering[larger] += 1

    def fitted(self, place: int) -> None:
        """Note that the configuration at `place` fitted.

        Configurations that ran out although they are not larger did so for another reason (another
        process on the GPU, for example), and no longer count.
        """
        for other in self._witnesses(place):
            self._forget(other)

    def covered(self) -> NDArray[np.bool_]:
        """Mask of the configurations that cannot fit, shape (configurations,)."""
        return self._covering > 0

    def witness(self, place: int) -> int | None:
        """The place of a known one that shows that `place` cannot fit; None if there is none."""
        return next(iter(self._witnesses(place)), None)

    def _witnesses(self, place: int) -> list[int]:
        if not self._covering[place]:
            return []
        return [known for known, larger in self._known.items() if place in larger]

    def _forget(self, known: int) -> None:
        self._covering[self._known.pop(known)] -= 1

    def _at_least(self, place: int) -> Places:
        """Places of all that are at least as large as the one at `place`, itself included."""
        members = self._members[self._group[place]]
        larger: Places = members[(self._places[members] >= self._places[place]).all(axis=1)]
        return larger


MOST_RISK = 0.5
"""Candidates are not tried if their probability of not fitting is above this. It limits samplers
that know nothing about memory; "guided" has a lower limit."""

REFIT_GROWTH = 0.05
"""The calibration is repeated when the number of trials has grown by this share."""

KNOWN_OOM, RISK, FAILS = 1, 2, 3
"""Why a configuration is held back; 0 where it is not."""


class CalibratedRisk:
    """The probability that each candidate does not fit, from predictions corrected by trials."""

    def __init__(self, predictions: Sequence[Prediction]) -> None:
        self._predictions = predictions
        self._records: list[TrialRecord] = []
        self._fitted = -1
        self._risk = np.zeros(0)

    def tell(self, record: TrialRecord) -> None:
        """Take a trial into account."""
        self._records.append(record)

    def risk(self) -> NDArray[np.float64]:
        """The risk of each candidate, shape (candidates,); refitted after enough new trials."""
        if len(self._records) > self._fitted * (1 + REFIT_GROWTH):
            space = self._records[-1].space if self._records else ""
            calibrations = calibrations_from(self._records)
            fitting = calibrations.probabilities_of_fitting(self._predictions, space)
            self._risk = 1.0 - fitting
            self._fitted = len(self._records)
        return self._risk


class PruningLog:
    """The candidates that are held back now, and those that were revived."""

    def __init__(self, candidates: Candidates, frontier: OomFrontier) -> None:
        self._candidates, self._frontier = candidates, frontier
        self._cause = np.zeros(len(candidates), dtype=np.int8)
        self._now: dict[int, Pruned] = {}
        self._revived: list[Pruned] = []

    @property
    def entries(self) -> tuple[Pruned, ...]:
        """The revived entries, then those that are held back now."""
        return (*self._revived, *(self._now[place] for place in sorted(self._now)))

    def untried(self) -> NDArray[np.bool_]:
        """Mask of the candidates that are held back now and were not tried."""
        return (self._cause > 0) & self._candidates.left

    def update(
        self,
        risk: NDArray[np.float64] | None,
        most_risk: float,
        trial_id: str | None,
        closed: Mapping[str, NDArray[np.bool_]],
    ) -> NDArray[np.bool_]:
        """Update the log after a trial; return the mask of the candidates that are held back.

        The mask includes tried candidates. `closed` are masks of candidates that would fail for
        another reason than memory, by that reason.
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
