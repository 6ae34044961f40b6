"""What the guided sampler has learned: from trials to a belief about every candidate."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.searches.guided.gain import LogNormal, staircase
from tuner.searches.guided.model import DEGREES, Belief, Floats, ResidualModel, features
from tuner.searches.guided.pool import Pool

TRUSTED_TRIALS, LARGEST_SURPRISE = 4.0, 4.0
"""Trials that must contradict the regression's own error before it counts for nothing, and the
most standard deviations that one of them counts as."""

LACK_OF_FIT = 0.015
"""Log throughput by which configurations differ from what their knobs let expect, in kernels
that suit one shape better than the next. The rest of the regression's noise is scatter."""

STALE_WEIGHT = 0.25
"""Of a trial by other versions of libraries: as one with twice the standard deviation."""

REFIT_GROWTH = 0.02
"""The regression is repeated when the trials are this share more than the last time."""


class Experience:
    """Trials by the place of their candidate, and what they say of all candidates.

    `known` are throughput and memory of those that fit, `oom` are those that ran out of memory,
    `spent` is how many were expected to run out, each judged before it was told.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.known: dict[int, tuple[float, float]] = {}
        self.oom: set[int] = set()
        self.spent = 0.0
        self._stale: dict[int, tuple[float, float]] = {}
        self._stale_oom: set[int] = set()
        # As arrays over all candidates too: a decision reads them whole.
        self._is_known = np.zeros(len(pool.parameters), dtype=bool)
        self._values = np.zeros((len(pool.parameters), 2))
        self._kept: tuple[Belief | None, NDArray[np.intp]] = (None, np.array([], dtype=np.intp))
        self._since: list[int] = []
        self._squares = array("d")
        self._caution = 1.0
        self._risk: tuple[Belief | None, int, int, Floats] = (None, 0, 0, np.zeros(0))
        columns = {name: pool.column(name) for name in pool.distributions}
        moving = pool.moving_share
        speed_prior, memory_prior = pool.speed_prior, pool.memory_prior
        self._speed_model = ResidualModel(
            features(columns, pool.coordinates, pool.work_shares, speed_prior), speed_prior
        )
        self._memory_model = ResidualModel(
            features(columns, pool.coordinates, {"moving": moving}, memory_prior),
            memory_prior,
            # Weights are where they are said to be; what the allocator makes of the rest scatters.
            scale=0.2 + 1.6 * moving,
        )
        self._fitted = -1
        self._speed = self._speed_model.prior_belief()
        self._memory = self._memory_model.prior_belief()

    def remember(self, index: int, values: tuple[float, float]) -> None:
        """Throughput and memory of a candidate under other circumstances (older libraries).

        They count for the regression, with a wider error, until the candidate is measured
        anew, and for nothing else: what ran out of memory then is more likely to do so now, and
        may be tried. To be called before the first trial.
        """
        if values[1] > self.pool.limit_bytes:
            self._stale_oom.add(index)
        else:
            self._stale[index] = values
        self._fitted = -1  # what was believed without them no longer holds

    def note(self, index: int, speed: float, size: float, *, failed: bool = False) -> None:
        """What a trial of the candidate at `index` came to; `failed` where memory was not why.

        A size beyond the limit means that it ran out of memory.
        """
        ran_out = size > self.pool.limit_bytes
        told = ran_out or not failed  # the memory of what failed is at best a prediction
        if told and size > 0 and index not in self.known and index not in self.oom:
            self._compare(index, float(self.pool.limit_bytes if ran_out else size), ran_out)
        if ran_out:
            self.oom.add(index)
        elif speed > 0 and size > 0 and not failed:
            if index in self.known:
                self._kept = (None, self._kept[1])  # what it kept off the front may come back
            self._since.append(index)
            self.known[index] = (speed, size)
            self._is_known[index] = True
            self._values[index] = speed, size

    def tried(self) -> NDArray[np.bool_]:
        """Which candidates said something of their memory."""
        found = self._is_known.copy()
        found[list(self.oom)] = True
        return found

    def _compare(self, index: int, device_bytes: float, ran_out: bool) -> None:
        """Note what all trials before this one said of its memory, and what it came to.

        Done when it is told and not when it is proposed, so that trials that an earlier search
        left behind, told again in their order, lead to the same decisions.
        """
        place = np.array([index], dtype=np.intp)
        self.spent += float(self.risk(place)[0])
        _, size = self.quantities(place)
        sd = float(size.sd[0]) / self._caution
        # How far it was beyond the limit is not known; what counts is that it was.
        surprise = (np.log(device_bytes) - float(size.mean[0])) / sd + (1.0 if ran_out else 0.0)
        # Less than expected is no reason for caution, however much less.
        most = LARGEST_SURPRISE**2 if surprise > 0 else 1.0
        self._squares.append(min(float(surprise) ** 2, most))
        self._caution = self._caution_now()

    def beliefs(self) -> tuple[Belief, Belief]:
        """What is expected of log(measured / predicted) throughput and memory, of every candidate.

        Learned anew when there are enough new trials to change it.
        """
        count = len(self.known) + len(self.oom)
        if count > self._fitted * (1 + REFIT_GROWTH):
            hints = {i: v for i, v in self._stale.items() if i not in self.known}
            every = {**self.known, **hints}
            seen = np.array(sorted(every), dtype=np.intp)
            trust = np.array([STALE_WEIGHT if i in hints else 1.0 for i in seen])
            old = self._stale_oom - self.oom - every.keys()
            oom = np.array(sorted(self.oom | old), dtype=np.intp)
            oom_trust = np.array([STALE_WEIGHT if i in old else 1.0 for i in oom])
            none = np.array([], dtype=np.intp)
            pool = self.pool
            known = np.array([every[i] for i in seen]).reshape(-1, 2)
            ratios = np.log(known[:, 0] / pool.samples_per_s[seen])
            # Without predictions not even the order of magnitude is known before the first trial.
            shift = float(np.median(ratios)) if pool.is_blind and len(ratios) else 0.0
            speed = self._speed_model.believe(seen, ratios - shift, none, np.array([]), trust=trust)
            self._speed = replace(speed, mean=speed.mean + shift)
            self._memory = self._memory_model.believe(
                seen,
                np.log(known[:, 1] / pool.device_bytes[seen]),
                oom,
                np.log(pool.limit_bytes / pool.device_bytes[oom]),
                trust=trust,
                trust_above=oom_trust,
            )
            self._fitted = count
        return self._speed, self._memory

    def risk_of_all(self) -> Floats:
        """The probability that each candidate runs out of memory, worked out once per outcome."""
        _, memory = self.beliefs()
        belief, compared, known, risk = self._risk
        if belief is not memory or (compared, known) != (len(self._squares), len(self.known)):
            risk = self.risk(slice(None))
            self._risk = (memory, len(self._squares), len(self.known), risk)
        return risk

    def risk(self, places: Any) -> Floats:
        """The probability that each candidate at `places` runs out of memory."""
        from scipy.special import stdtr

        _, size = self.quantities(places)
        # Student's t: how far trials scatter is known no better than from this many of them.
        degrees = DEGREES + len(self.known)
        short = stdtr(degrees, (size.mean - np.log(self.pool.limit_bytes)) / size.sd)
        return np.asarray(short, dtype=float)

    def estimates(self) -> tuple[NDArray[np.intp], Floats, Floats]:
        """Places that were measured, their throughput less the scatter of trials, their memory.

        A measured value and what the regression makes of all trials are weighed by how far
        trials scatter and how far configurations differ from the regression.
        """
        seen = np.flatnonzero(self._is_known)
        return seen, *self._estimates_at(seen)

    def front_estimates(self) -> tuple[Floats, Floats]:
        """The same throughput and memory of those that may be on the front, and of few others.

        What is not on it when the regression is repeated cannot come to it before the next time.
        """
        belief, _ = self.beliefs()
        if self._kept[0] is not belief:
            seen, speed, size = self.estimates()
            self._kept, self._since = (belief, seen[staircase(speed, size)]), []
        return self._estimates_at(np.concatenate([self._kept[1], self._since]).astype(np.intp))

    def _estimates_at(self, seen: NDArray[np.intp]) -> tuple[Floats, Floats]:
        known = self._values[seen]
        belief, _ = self.beliefs()
        scatter = max(belief.noise**2 - LACK_OF_FIT**2, 0.25 * LACK_OF_FIT**2)
        weight = scatter / (scatter + LACK_OF_FIT**2)
        fitted = np.log(self.pool.samples_per_s[seen]) + belief.mean[seen]
        speed = np.exp((1 - weight) * np.log(known[:, 0]) + weight * fitted)
        return speed, known[:, 1]

    def quantities(self, places: Any) -> tuple[LogNormal, LogNormal]:
        """What is expected of throughput and memory of the candidates at `places`."""
        speed, memory = self.beliefs()
        pool = self.pool
        size_sd = memory.sd[places] * self._caution
        return (
            LogNormal(np.log(pool.samples_per_s[places]) + speed.mean[places], speed.sd[places]),
            LogNormal(np.log(pool.device_bytes[places]) + memory.mean[places], size_sd),
        )

    def _caution_now(self) -> float:
        """How much wider memory exceeds what the regression thinks, by what it said in advance.

        A regression with more features than trials takes scatter for effects of knobs at first.
        """
        squares = np.frombuffer(self._squares)
        mean = (TRUSTED_TRIALS + squares.sum()) / (TRUSTED_TRIALS + len(squares))
        return max(1.0, float(np.sqrt(mean)))
