"""The guided search: it starts from predictions and hardly ever runs out of memory.

It knows all valid configurations and their predictions, learns the error of predictions from every
trial, and chooses the configuration with the largest expected gain among those that will very
probably fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.core.records import Configuration, TrialRecord
from tuner.searches.candidates import Candidates
from tuner.searches.failures import Failures, failure_of
from tuner.searches.guided import experience
from tuner.searches.guided.goals import Front, Goal, GoalFront, LogNormal
from tuner.searches.guided.pool import Pool
from tuner.searches.guided.regression import Floats
from tuner.searches.strategies import OUTCOME_CONSTRAINT, Strategy, score

OOM_SHARE = 0.02
"""Share of trials that may run out of memory, in expectation."""

BLIND_RISK = 0.5
"""Without predictions: the highest risk of the least risky candidate."""

ADVANCE_TRIALS = 40
"""The risk of this many trials may be spent early, on candidates that would move the front."""

CLEARLY = 3.0
"""A trial tells two cases apart if their means differ by this many times the noise."""

THROUGHPUT_WEIGHT = 0.5
"""Weight of a gain in the best throughput, relative to the same gain in hypervolume."""

DOUBT, BLIND_DOUBT = 0.15, 1.0
"""Share of the standard deviations that counts in a candidate's gain, with and without predictions.
A small share tries candidates believed to be on the front before those that might be; before any
evidence, this is the predicted front, the largest gain first."""

EXPLORES = 3
"""With predictions, one trial of this many counts all of the standard deviations."""


class Guided:
    """Chooses among the candidates of a pool.

    `goals` replace throughput and memory; the first goal is primary. With `repeats`, a candidate
    that fitted may run again, where that is worth more than a new one; else each runs once.
    """

    def __init__(self, pool: Pool, *, goals: Sequence[Goal] = (), repeats: bool = False) -> None:
        self.pool = pool
        self.repeats = repeats
        self._goals = tuple(goals)
        self.experience = experience.Experience(pool)
        self.failures = Failures(pool.candidates.columns)
        self._values = experience.unordered_values(pool).values()
        self._ended = np.zeros(len(pool.candidates), dtype=bool)
        self._pending: set[int] = set()
        self._held_back = np.zeros(len(pool.candidates), dtype=bool)

    def choose(self) -> int | None:
        """The place of the best candidate, which then runs; None when none may fit."""
        place = self._next()
        if place is not None:
            self.begin(place)
        return place

    def _next(self) -> int | None:
        """The place of the best new candidate, or of one to run again."""
        if not self.repeats or self._goals:
            return self.best_candidate()
        place, worth = self._best()
        seen, _, size = self.experience.estimates()
        usable = size <= self.pool.usable_bytes
        seen = seen[usable & ~np.isin(seen, self._running())]
        if len(seen) < 2:
            return place
        gains = self.experience.gains_of_repeats(seen)
        least = max(experience.LEAST_GAIN, worth)
        return int(seen[np.argmax(gains)]) if gains.max() > least else place

    def begin(self, place: int) -> None:
        """Note that a trial of this candidate runs, even if it was chosen elsewhere."""
        self._pending.add(place)

    def end(
        self,
        place: int,
        values: tuple[float, float] | None = None,
        *,
        failure: str | None = None,
        failed: bool = False,
    ) -> None:
        """Learn from a trial: `values` are throughput and memory in bytes.

        Memory beyond the limit means that the trial ran out of memory. `failure` is the kind of
        error that ended it. Values of a `failed` trial are ignored unless it ran out of memory.
        """
        self._pending.discard(place)
        self._ended[place] = True
        if failure is not None:
            self.failures.failed(place, failure)
        elif values is not None:
            self.experience.note(place, *values, failed=failed)
            if not failed and values[1] <= self.pool.limit_bytes:
                self.failures.ran(place)

    def best_candidate(self) -> int | None:
        """The place of the candidate to run next; None if no candidate is left that may fit."""
        return self._best()[0]

    def _best(self) -> tuple[int | None, float]:
        """The candidate with the largest expected gain, what it teaches about others included."""
        places = self._open()
        if not places.size:
            return None, 0.0
        risk = self.oom_probability()[places]
        allowed = self.allowed_risk()
        advance = 0.0  # the risk that proposals may take which move the front
        if self._may_probe():
            advance = min(OOM_SHARE * ADVANCE_TRIALS - self._spent(), experience.HIGHEST_RISK)
        possible = risk <= max(allowed, advance)
        if not possible.any():
            # The first trial must take a risk; later ones do so only if it is affordable.
            must = not self.experience.known
            if must or (self.pool.is_blind and risk.min() < BLIND_RISK):
                return int(places[np.argmin(risk)]), 0.0
            return self._probe(), 0.0
        chances, gains = self._gains_by_case(places)
        told = self._told(places, risk <= allowed, chances, gains)[possible]
        gain = (chances @ gains)[possible]
        places, risk = places[possible], risk[possible]
        if (probe := self._probe(places)) is not None:
            return probe, 0.0
        risky = risk > allowed
        if risky.all():  # no safe candidate is left
            risky[:] = False
        # A trial that runs clears values of blame, which is worth more after more failures.
        runs = self.failures.probability()[places]
        worth = gain * runs**self.failures.in_a_row + told
        worth[risky & (gain < experience.LEAST_GAIN)] = -1.0
        best = int(np.argmax(worth))
        return int(places[best]), float(worth[best])

    def _told(
        self, places: NDArray[np.intp], safe: NDArray[np.bool_], chances: Floats, gains: Floats
    ) -> Floats:
        """The gain that each of `places` is expected to open by telling what caused earlier trials.

        A safe candidate tells whether a cause is real if its throughput or memory would be
        different. If so, others are allowed, or known to be fast, that are not so now. `chances`
        and `gains` are those of `_gains_by_case`.
        """
        worth = np.zeros(len(places))
        if len(chances) < 2 or not self.experience.known:
            return worth
        cases = self.experience.quantities_by_case(places)
        now = float(np.max((chances @ gains)[safe], initial=0.0))
        allowed, noises = self.allowed_risk(), [b.noise for b in self.experience.beliefs()]
        speeds = np.array([speed.mean for _, speed, _ in cases]) / noises[0]
        sizes = np.array([size.mean for _, _, size in cases]) / noises[1]
        for case, risk in enumerate(self.experience.risks(places)):
            opened = float(np.max(np.where(risk <= allowed, gains[case], 0.0))) - now
            if opened > experience.LEAST_GAIN:
                differs = np.maximum(abs(speeds - speeds[case]), abs(sizes - sizes[case])) > CLEARLY
                telling = chances @ differs / max(1.0 - chances[case], 1e-9)
                worth += chances[case] * opened * telling
        return np.where(safe, worth, 0.0)

    def _probe(self, others: NDArray[np.intp] | None = None) -> int | None:
        """The probe of a level that may be misjudged as a whole, if a probe is due.

        It waits while one of the `others` has a larger expected gain.
        """
        if not self._may_probe():
            return None
        probe = experience.best_probe(
            self.experience, self._values, self._open(), self.front().fastest
        )
        if probe is None:
            return None
        if others is not None:
            volume, first = self._gains(others)
            if probe.worth < (volume + first).max():
                return None
        return probe.place

    def _may_probe(self) -> bool:
        """True if the search can afford a deliberate trial that may run out of memory."""
        ran_out, running = len(self.experience.oom), self._running()
        doubtful = (self.oom_probability()[running] > experience.HIGHEST_RISK).any()
        affordable = ran_out * ADVANCE_TRIALS <= self._ended.sum() and not doubtful
        return bool(affordable and self.experience.known and not self.pool.is_blind)

    def largest_gain(self) -> float | None:
        """The largest expected gain of any remaining candidate, as a share.

        It is the larger of the gains in hypervolume and in the first objective (throughput). 0 if
        no candidate is worth its risk; None while no candidate is known to fit.
        """
        _, _, size = self.experience.estimates()
        if not (size <= self.pool.usable_bytes).any():
            return None
        places = self._open()
        places = places[self.oom_probability()[places] <= self.allowed_risk()]
        volume, first = self._gains(places)
        return float(np.maximum(volume, first).max(initial=0.0))

    def _open(self) -> NDArray[np.intp]:
        """Places of candidates that are not tried, running, held back or closed by failures."""
        open_ = ~(self._held_back | self._ended)
        for closed in self.failures.closed().values():
            open_ &= ~closed
        open_[list(self._pending)] = False
        return np.flatnonzero(open_)

    def hold_back(self, mask: NDArray[np.bool_]) -> None:
        """Hold back the candidates of `mask`, and no others."""
        self._held_back = mask

    def allowed_risk(self) -> float:
        """The probability of running out of memory that the next proposal may have.

        It is at least the share that may run out: with less, trials that ran out by bad luck
        would end the search. Most proposals have almost no risk, which saves some for the few
        close to the limit.
        """
        trials = int(self._ended.sum()) + len(self._pending) + 1
        left = OOM_SHARE * trials - self._spent()
        return min(max(left, OOM_SHARE), experience.HIGHEST_RISK)

    def _spent(self) -> float:
        """Number of trials that ran out of memory, and of running ones expected to."""
        return len(self.experience.oom) + float(self.experience.risk(self._running()).sum())

    def untried(self) -> tuple[int, int | None]:
        """The number of untried candidates predicted not to fit, and the best test of it."""
        return experience.never_tried(self.experience, self._open(), self.front().fastest)

    def oom_probability(self) -> Floats:
        """The probability that each candidate runs out of memory."""
        return self.experience.risk_of_all()

    def expected_gain(self, places: NDArray[np.intp]) -> Floats:
        """Expected gain of the candidates at `places`: shares of hypervolume and of throughput.

        Running trials count with their expected results.
        """
        chances, gains = self._gains_by_case(places)
        return np.asarray(chances @ gains)

    def _gains_by_case(self, places: NDArray[np.intp]) -> tuple[Floats, Floats]:
        """The probability of each case, and the expected gains in it, shape (cases, places)."""
        trials = int(self._ended.sum()) + len(self._pending) + 1
        doubt = BLIND_DOUBT if self.pool.is_blind or trials % EXPLORES == 0 else DOUBT
        found = self._shares(places, doubt)
        gains = [volume + THROUGHPUT_WEIGHT * first for _, volume, first in found]
        return np.array([chance for chance, _, _ in found]), np.array(gains)

    def _gains(self, places: NDArray[np.intp]) -> tuple[Floats, Floats]:
        """Expected gains, as shares of the hypervolume and of the best first objective."""
        found = self._shares(places, doubt=1.0)
        return (
            np.asarray(np.sum([chance * volume for chance, volume, _ in found], axis=0)),
            np.asarray(np.sum([chance * first for chance, _, first in found], axis=0)),
        )

    def _shares(self, places: NDArray[np.intp], doubt: float) -> list[tuple[float, Floats, Floats]]:
        """The probability of each case, and in it the expected gains of `_gains`.

        `doubt` is the share of the standard deviations that counts.
        """
        runs, front = self.failures.probability()[places], self.front()
        goals = None
        if self._goals:  # the front of measured and running candidates
            seen, rates, sizes = self._so_far()
            small = sizes <= self.pool.usable_bytes
            goals = GoalFront(self._goals, seen[small], rates[small], sizes[small])
        found = []
        for chance, wide_speed, wide_size in self.experience.quantities_by_case(places):
            fits = runs * wide_size.probability_below(self.pool.usable_bytes)
            speed = LogNormal(wide_speed.mean, doubt * wide_speed.sd)
            size = LogNormal(wide_size.mean, doubt * wide_size.sd)
            if goals is not None:
                volume, first = goals.expected_gain(places, speed, size)
                found.append((chance, fits * volume, fits * first))
                continue
            whole = max(front.hypervolume, 1e-12) if front.speed.size else 1.0
            volume = front.expected_gain(speed, size) / whole
            # The narrowed memory no longer includes the chance to fit.
            volume *= fits if doubt < 1.0 else runs
            faster = speed.expected_above(front.fastest) / (front.fastest or 1.0)
            found.append((chance, volume, fits * faster))
        return found

    def _so_far(self) -> tuple[NDArray[np.intp], Floats, Floats]:
        """Places of measured and running candidates, with their throughput and memory."""
        running = self._running()
        speed, size = self.experience.quantities(running)
        seen, known_speed, known_size = self.experience.estimates()
        return (
            np.concatenate([seen, running]),
            np.concatenate([known_speed, speed.expected]),
            np.concatenate([known_size, size.expected]),
        )

    def front(self) -> Front:
        """The front of measured candidates and of the expected results of running ones."""
        known_speed, known_size = self.experience.front_estimates()
        speed, size = self.experience.quantities(self._running())
        return Front.of(
            np.concatenate([known_speed, speed.expected]),
            np.concatenate([known_size, size.expected]),
            usable_bytes=self.pool.usable_bytes,
            reference_bytes=self.pool.limit_bytes,
        )

    def _running(self) -> NDArray[np.intp]:
        return np.array(sorted(self._pending), dtype=np.intp)


class GuidedStrategy(Strategy):
    """The guided search as a strategy, with configurations and records instead of places."""

    def __init__(self, candidates: Candidates, guide: Guided) -> None:
        self._candidates, self._guide = candidates, guide

    def propose(self) -> Configuration | None:
        """The configuration of `Guided.choose`."""
        place = self._guide.choose()
        return None if place is None else self._candidates.configurations[place]

    def begin(self, configuration: Configuration) -> None:
        """Count the configuration among the running trials."""
        self._guide.begin(self._candidates.place(configuration))

    def tell(self, record: TrialRecord) -> None:
        """Learn from the record's score or error."""
        scored = score(record)
        self._guide.end(
            self._candidates.place(record.configuration),
            scored.values if scored else None,
            failure=failure_of(record.outcome),
            failed=scored is not None and scored.constraints[OUTCOME_CONSTRAINT] > 0,
        )
