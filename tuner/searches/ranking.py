"""Ranks the trials so far: which cannot win, which are tied, and which one to verify.

All decisions depend on the records alone, so that a search that continues after an interruption
decides as if there had been none.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tuner.core.records import Configuration, TrialRecord
from tuner.searches.front import THROUGHPUT, Objective, rate_of, size_of
from tuner.searches.journal import latest
from tuner.trial.base import GiveUp

MOST_RUNS = 3
"""Most runs of one configuration to break a tie; a tie after three runs is negligible."""

REPEAT_SHARE = 0.1
"""Share of the trials, the last ones, that may repeat near-ties instead of trying new ones."""

MOST_FAILED_VERIFICATIONS = 5
"""Verification stops after this many failures, because the configurations are unlikely to be the
cause."""


class _Fitting(NamedTuple):
    """A configuration that fits; sorts by size, then the fastest first, then the earliest.

    `number` is unique, so that records are never compared.
    """

    size_bytes: int
    minus_rate: float
    number: int
    record: TrialRecord


class Ranking:
    """The records, pooled for each configuration and updated with each record."""

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self.count = 0
        self.verifications: list[TrialRecord] = []
        self._runs: dict[Configuration, list[TrialRecord]] = {}
        self._fitting: dict[Configuration, _Fitting] = {}
        # The same, sorted, to find ties and the front quickly.
        self._by_size: list[_Fitting] = []
        self._by_reach: list[tuple[float, int, TrialRecord]] = []
        self._front: list[TrialRecord] = []
        self._slowest: tuple[tuple[int, float], ...] | None = None
        for record in records:
            self.add(record)

    def add(self, record: TrialRecord) -> None:
        """Add the next record."""
        configuration = record.configuration
        runs = self._runs.setdefault(configuration, [])
        runs.append(record)
        self.count += 1
        if record.verification:
            self.verifications.append(record)
        before = self._fitting.pop(configuration, None)
        (together,) = latest(runs)
        if before is not None:
            self._leave(before)
        if together.fits and together.outcome.ran is not None:
            fitting = _Fitting(size_of(together), -rate_of(together), self.count, together)
            self._fitting[configuration] = fitting
            self._enter(fitting)
            if before is None:
                points = (
                    _Fitting(size_of(r), -rate_of(r), place, r)
                    for place, r in enumerate([*self._front, together])
                )
                self._advance(_staircase(sorted(points)))
        if before is not None:  # others may come back to the front
            self._advance(_staircase(self._by_size))

    def _advance(self, front: list[TrialRecord]) -> None:
        if len(front) != len(self._front) or any(map(operator.is_not, front, self._front)):
            self._front, self._slowest = front, None

    def _enter(self, fitting: _Fitting) -> None:
        bisect.insort(self._by_size, fitting)
        interval = _interval(fitting.record)
        if interval is not None:
            bisect.insort(self._by_reach, (interval[1], fitting.number, fitting.record))

    def _leave(self, fitting: _Fitting) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, fitting)]
        interval = _interval(fitting.record)
        if interval is not None:
            at = bisect.bisect_left(self._by_reach, (interval[1], fitting.number))
            del self._by_reach[at]

    def as_fast_as(self, samples_per_s: float) -> list[TrialRecord]:
        """The fitting records whose interval of throughput reaches `samples_per_s`."""
        reaching = bisect.bisect_left(self._by_reach, (samples_per_s,))
        return [record for _, _, record in self._by_reach[reaching:]]

    def runs(self, configuration: Configuration) -> Sequence[TrialRecord]:
        """The records of one configuration, in the order in which they were added."""
        return self._runs.get(configuration, ())

    def unsteady(self) -> str | None:
        """A note if repeats of a configuration differ by more than their intervals; else None."""
        largest = 0.0
        for runs in self._runs.values():
            ran = [r for r in runs if r.fits and _interval(r) is not None]
            if len(ran) > 1 and max(_ends(r)[0] for r in ran) > min(_ends(r)[1] for r in ran):
                rates = [rate_of(record) for record in ran]
                largest = max(largest, max(rates) / min(rates) - 1)
        if not largest:
            return None
        return (
            "the machine was not steady: trials of one configuration differed by up to "
            f"{100 * largest:.0f} %, more than their intervals"
        )

    @property
    def fitting(self) -> list[TrialRecord]:
        """One record of each configuration that fitted in a measured or emulated trial."""
        return [fitting.record for fitting in self._fitting.values()]

    def front(self) -> Sequence[TrialRecord]:
        """The Pareto front of `fitting`, the smallest first."""
        return self._front

    def slowest(self) -> tuple[tuple[int, float], ...]:
        """The sizes of the front, in bytes, with the lower end of each throughput in samples/s.

        It is the same object until the front changes, because Ray keeps a copy per trial.
        """
        if self._slowest is None:
            self._slowest = tuple((size_of(record), _ends(record)[0]) for record in self._front)
        return self._slowest


def give_up_rule(ranking: Ranking, usable_bytes: int) -> GiveUp:
    """The rule for giving up a trial that starts now: the front, at its slowest plausible rates."""
    return GiveUp(usable_bytes, ranking.slowest())


def near_tie(ranking: Ranking) -> Configuration | None:
    """The configuration to run again because of a tie; None if the front is decided.

    Configurations are tied if the intervals of their measured throughput overlap: neighbours on the
    front, the larger of which may be no faster, and any that may be as fast as the fastest. The one
    with fewer runs goes first, then the faster one.
    """
    front = [record for record in ranking.front() if _interval(record) is not None]
    if not front:
        return None
    fastest = front[-1]
    as_fast = [
        (other, fastest) for other in ranking.as_fast_as(_ends(fastest)[0]) if other is not fastest
    ]
    neighbours = [(a, b) for a, b in itertools.pairwise(front) if _ends(a)[1] >= _ends(b)[0]]
    tied = {
        record.configuration: record
        for pair in (*neighbours, *as_fast)
        for record in pair
        if len(ranking.runs(record.configuration)) < MOST_RUNS
    }
    return min(tied, key=lambda c: (len(ranking.runs(c)), -rate_of(tied[c]), c.key), default=None)


def to_verify(ranking: Ranking, first: Objective = THROUGHPUT) -> Configuration | None:
    """The best fitting configuration in the first objective; None if it was tried or none fits."""
    fitting = [record for record in ranking.fitting if first.gain(record) is not None]
    if not fitting:
        return None
    best = max(fitting, key=lambda record: first.gain(record) or 0.0).configuration
    tried = ranking.verifications
    failed = sum(not record.verified for record in tried)
    was_tried = any(record.configuration == best for record in tried)
    return None if was_tried or failed >= MOST_FAILED_VERIFICATIONS else best


def _staircase(by_size: Iterable[_Fitting]) -> list[TrialRecord]:
    """The Pareto front of records that are sorted already."""
    found: list[TrialRecord] = []
    slowness = math.inf
    for _, minus_rate, _, record in by_size:
        if minus_rate < slowness:
            found.append(record)
            slowness = minus_rate
    return found


def _interval(record: TrialRecord) -> tuple[float, float] | None:
    ran = record.outcome.ran
    return None if ran is None else ran.samples_per_s_interval


def _ends(record: TrialRecord) -> tuple[float, float]:
    return _interval(record) or (rate_of(record), rate_of(record))
