"""Beliefs about every candidate, learned from trials, and probes of values never tried."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.searches.failures import Suspects
from tuner.searches.guided.goals import LogNormal, staircase
from tuner.searches.guided.pool import Pool
from tuner.searches.guided.regression import Belief, Fit, Floats, ResidualModel, Trials, features

LEAST_PROBABLE = 0.02
"""Causes that are less probable are left out."""

LEAST_SCATTER = 0.005
"""The least standard deviation, in log throughput, of trials of one configuration, and of
configurations from the regression: that of an idle machine in our own trials."""

STALE_WEIGHT = 0.25
"""Weight of a trial with other library versions: that of twice the standard deviation."""

REFIT_GROWTH = 0.02
"""The regression is repeated when the number of trials has grown by this share."""


@dataclass(frozen=True, slots=True)
class _Case:
    """The beliefs about throughput and memory of every candidate if one cause is real, or none."""

    probability: float
    speed: Belief
    memory: Belief


class Experience:
    """Trials by the place of their candidate, and the beliefs about all candidates.

    `known` holds throughput and memory of the candidates that fit, `oom` those that ran out of
    memory.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.known: dict[int, tuple[float, float]] = {}
        self.oom: set[int] = set()
        self._speeds: dict[int, list[float]] = {}
        self._runs = np.zeros(len(pool.candidates))
        self._told = 0
        self._stale: dict[int, tuple[float, float]] = {}
        self._stale_oom: set[int] = set()
        # The same as `known`, as arrays over all candidates, because decisions need all of them.
        self._is_known = np.zeros(len(pool.candidates), dtype=bool)
        self._values = np.zeros((len(pool.candidates), 2))
        self._kept: tuple[Belief | None, NDArray[np.intp]] = (None, np.array([], dtype=np.intp))
        self._since: list[int] = []
        self._risk: tuple[int, Floats] = (-1, np.zeros(0))
        self._suspects = Suspects(pool.candidates.columns)
        columns, coordinates = pool.candidates.columns, pool.candidates.coordinates
        moving = pool.moving_share
        speed_prior, memory_prior = pool.speed_prior, pool.memory_prior
        self._speed_model = ResidualModel(
            features(columns, coordinates, {"rate": pool.log_rate}, speed_prior), speed_prior
        )
        self._memory_model = ResidualModel(
            features(columns, coordinates, {"moving": moving}, memory_prior),
            memory_prior,
            # The memory of weights is exact; the allocator makes the rest scatter.
            scale=0.2 + 1.6 * moving,
        )
        self._fitted = -1
        self._cases: list[_Case] = []
        self._beliefs: tuple[Belief, Belief]
        self._plain: Floats = np.zeros(0)

    def remember(self, index: int, values: tuple[float, float]) -> None:
        """Take throughput and memory of a candidate with other library versions as a hint.

        Hints count only for the regression, with a wider error, until the candidate is measured
        again: a candidate that ran out of memory then is riskier now, but may be tried. Call it
        before the first trial.
        """
        if values[1] > self.pool.limit_bytes:
            self._stale_oom.add(index)
        else:
            self._stale[index] = values
        self._fitted = -1  # beliefs without the hint are outdated

    def note(self, index: int, speed: float, size: float, *, failed: bool = False) -> None:
        """Learn from a trial of the candidate at `index`; `failed` if it ended with another error.

        A size beyond the limit means that it ran out of memory.
        """
        ran_out = size > self.pool.limit_bytes
        if ran_out:
            self.oom.add(index)
            self._told += 1
        elif speed > 0 and size > 0 and not failed:
            if index in self.known:
                self._kept = (None, self._kept[1])  # others may come back to the front
                size = max(size, self.known[index][1])
            self._told += 1
            self._since.append(index)
            logs = self._speeds.setdefault(index, [])
            logs.append(float(np.log(speed)))
            self._runs[index] = len(logs)
            self.known[index] = (float(np.exp(np.mean(logs))), size)
            self._is_known[index] = True
            self._values[index] = self.known[index]

    @property
    def repeats(self) -> int:
        """The number of trials of configurations that had fitted before."""
        return sum(len(logs) - 1 for logs in self._speeds.values())

    def trial_noise(self) -> float:
        """Standard deviation, in log throughput, of trials of one configuration."""
        every, chances = self._noises()
        return float(np.sqrt(chances @ every**2))

    def _noises(self) -> tuple[Floats, Floats]:
        """Possible standard deviations of trials of one configuration, with their probabilities.

        Only repeats tell it from a lack of fit. Before, anything between `LEAST_SCATTER` and all
        that the regression does not explain is as likely, on a logarithmic scale.
        """
        belief, _ = self.beliefs()
        every = np.geomspace(LEAST_SCATTER, max(belief.noise, 2 * LEAST_SCATTER), 16)
        squares = sum(float(np.var(s)) * len(s) for s in self._speeds.values() if len(s) > 1)
        logs = -self.repeats * np.log(every) - squares / (2 * every**2)
        chances = np.exp(logs - logs.max())
        return every, chances / chances.sum()

    def lack_of_fit(self, noise: float | None = None) -> float:
        """Standard deviation, in log throughput, of configurations from the regression.

        Differences from the regression that are not `noise`, the scatter of trials.
        """
        belief, _ = self.beliefs()
        runs = self._runs[self._is_known]
        scatter = (
            (noise or self.trial_noise()) ** 2 * float(np.mean(1 / runs)) if len(runs) else 0.0
        )
        return max(LEAST_SCATTER, float(np.sqrt(max(belief.noise**2 - scatter, 0.0))))

    def tried(self) -> NDArray[np.bool_]:
        """Mask of the candidates whose trial fitted or ran out of memory."""
        found = self._is_known.copy()
        found[list(self.oom)] = True
        return found

    def beliefs(self) -> tuple[Belief, Belief]:
        """Beliefs about log(measured / predicted) throughput and memory of every candidate.

        They are learned again after enough new trials.
        """
        self.cases()
        return self._beliefs

    def cases(self) -> list[_Case]:
        """The possible meanings of the trials: no cause stands out, or one does."""
        if self._told > self._fitted * (1 + REFIT_GROWTH):
            # Matrices this small are slower with several threads, even more so beside others.
            with _thread_pools().limit(limits=1, user_api="blas"):
                self._cases = self._learn()
            self._beliefs = (
                _mixed(self._cases, [case.speed for case in self._cases]),
                _mixed(self._cases, [case.memory for case in self._cases]),
            )
            self._fitted = self._told
        return self._cases

    def _learn(self) -> list[_Case]:
        hints = {i: v for i, v in self._stale.items() if i not in self.known}
        every = {**self.known, **hints}
        seen = np.array(sorted(every), dtype=np.intp)
        trust = np.array([STALE_WEIGHT if i in hints else 1.0 for i in seen])
        old = self._stale_oom - self.oom - every.keys()
        oom = np.array(sorted(self.oom | old), dtype=np.intp)
        oom_trust = np.array([STALE_WEIGHT if i in old else 1.0 for i in oom])
        pool = self.pool
        known = np.array([every[i] for i in seen]).reshape(-1, 2)
        speeds = np.log(known[:, 0] / pool.samples_per_s[seen])
        sizes = np.log(known[:, 1] / pool.device_bytes[seen])
        bounds = np.log(pool.limit_bytes / pool.device_bytes[oom])
        # Without predictions, even the order of magnitude is unknown before the first trial.
        shift = float(np.median(speeds)) if pool.is_blind and len(speeds) else 0.0
        speed = self._speed_model.fit(Trials(seen, speeds - shift, trust))
        self._plain = speed.belief.mean + shift
        memory = self._memory_model.fit(Trials(seen, sizes, trust), Trials(oom, bounds, oom_trust))
        cases = self._with_causes(speed, memory)
        if shift:
            cases = [
                replace(case, speed=replace(case.speed, mean=case.speed.mean + shift))
                for case in cases
            ]
        return cases

    def _with_causes(self, speed: Fit, memory: Fit) -> list[_Case]:
        """The fits, and what they become with each probable cause of both.

        Before any trial, no cause, one value or pair, and one configuration are equally likely.
        """
        seen = len(speed.trials.places)
        causes, has = self._suspects.among(memory.trials.places)
        marks = has.astype(float)
        likely = np.array([self._suspects.chance(cause) for cause in causes])
        odds = np.concatenate([
            # Suspects that no trial has change nothing.
            [np.log(2.0 - likely.sum())],
            speed.odds(marks[:seen]) + memory.odds(marks) + np.log(likely),
            speed.odds_alone() - np.log(max(seen, 1)),
        ])  # fmt: skip
        chances = np.exp(odds - odds.max())
        chances /= chances.sum()
        cases = []
        for number in np.flatnonzero(chances >= min(LEAST_PROBABLE, chances.max())):
            own_speed, own_memory, cause = speed.belief, memory.belief, number - 1
            if 0 <= cause < len(causes):
                mask = self._suspects.has(causes[cause]).astype(float)
                mark = marks[:, cause]
                own_speed = speed.under(mark[:seen], mask)
                own_memory = memory.under(mark, mask)
            elif cause >= 0:
                trial = cause - len(causes)
                mask, mark = np.zeros(len(self.pool.candidates)), np.zeros(seen)
                mask[speed.trials.places[trial]] = mark[trial] = 1.0
                own_speed = speed.under(mark, mask)
            cases.append(_Case(float(chances[number]), own_speed, own_memory))
        whole = sum(case.probability for case in cases)
        return [replace(case, probability=case.probability / whole) for case in cases]

    def risk_of_all(self) -> Floats:
        """The probability that each candidate runs out of memory, computed once per outcome."""
        self.cases()
        if self._risk[0] != self._told:
            self._risk = (self._told, self.risk(slice(None)))
        return self._risk[1]

    def risk(self, places: Any) -> Floats:
        """The probability that each candidate at `places` runs out of memory."""
        chances = np.array([case.probability for case in self.cases()])
        return np.asarray(chances @ self.risks(places))

    def risks(self, places: Any) -> Floats:
        """The probability that each runs out of memory in each case, shape (cases, places)."""
        limit = self.pool.limit_bytes
        sizes = [size for _, _, size in self.quantities_by_case(places)]
        return np.array([1.0 - size.probability_below(limit) for size in sizes])

    def estimates(self) -> tuple[NDArray[np.intp], Floats, Floats]:
        """Measured places, with their throughput smoothed by the regression, and their memory.

        The throughput is a mean of the measured value and that of the regression, each weighted by
        what it proves: by the scatter of trials, and by the lack of fit.
        """
        seen = np.flatnonzero(self._is_known)
        return seen, *self._estimates_at(seen)

    def front_estimates(self) -> tuple[Floats, Floats]:
        """Throughput and memory, as in `estimates`, of places that may be on the front.

        A few other places may be included. Places off the front when the regression is repeated
        cannot come back to it before the next repetition.
        """
        belief, _ = self.beliefs()
        if self._kept[0] is not belief:
            seen, speed, size = self.estimates()
            self._kept, self._since = (belief, seen[staircase(speed, size)]), []
        return self._estimates_at(np.concatenate([self._kept[1], self._since]).astype(np.intp))

    def _estimates_at(
        self, seen: NDArray[np.intp], noise: float | None = None
    ) -> tuple[Floats, Floats]:
        known = self._values[seen]
        noise = noise or self.trial_noise()
        scatter = noise**2 / self._runs[seen]
        weight = scatter / (scatter + self.lack_of_fit(noise) ** 2)
        # Without causes: those of a single configuration are what its own trials say already.
        fitted = np.log(self.pool.samples_per_s[seen]) + self._plain[seen]
        speed = np.exp((1 - weight) * np.log(known[:, 0]) + weight * fitted)
        return speed, known[:, 1]

    def gains_of_repeats(self, seen: NDArray[np.intp]) -> Floats:
        """The expected gain in the recommendation's throughput by another trial of each place.

        It is that of the knowledge gradient (Frazier, Powell and Dayanik 2008). That of the best
        place also tells how much trials scatter, and so which place is to be recommended.
        """
        noise, own = self.trial_noise() ** 2, self.lack_of_fit() ** 2
        speed, _ = self._estimates_at(seen)
        runs = self._runs[seen]
        moves = np.sqrt(1 / (runs / noise + 1 / own) - 1 / ((runs + 1) / noise + 1 / own))
        log = np.log(speed)
        order = np.argsort(log)
        rival = np.full(len(seen), log[order[-1]])
        rival[order[-1]] = log[order[-2]] if len(seen) > 1 else -np.inf
        from scipy.special import ndtr

        z = -np.abs(log - rival) / moves
        gains = moves * (z * ndtr(z) + np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi))
        best = order[-1]
        for each, chance in zip(*self._noises(), strict=True):
            known, _ = self._estimates_at(seen, float(each))
            gains[best] += chance * np.log(known.max() / known[best])
        return np.asarray(gains)

    def quantities(self, places: Any) -> tuple[LogNormal, LogNormal]:
        """Expected throughput and memory of the candidates at `places`, as distributions."""
        return self._quantities(places, *self.beliefs())

    def quantities_by_case(self, places: Any) -> list[tuple[float, LogNormal, LogNormal]]:
        """The probability of each case, and throughput and memory in it."""
        return [
            (case.probability, *self._quantities(places, case.speed, case.memory))
            for case in self.cases()
        ]

    def _quantities(
        self, places: Any, speed: Belief, memory: Belief
    ) -> tuple[LogNormal, LogNormal]:
        pool = self.pool
        return (
            LogNormal(np.log(pool.samples_per_s[places]) + speed.mean[places], speed.sd[places]),
            LogNormal(np.log(pool.device_bytes[places]) + memory.mean[places], memory.sd[places]),
        )


@functools.cache
def _thread_pools() -> Any:
    """The thread pools of the loaded libraries; finding them takes 10 ms."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _mixed(cases: Sequence[_Case], beliefs: Sequence[Belief]) -> Belief:
    """One belief with the mean and variance of all cases together."""
    if len(cases) == 1:
        return beliefs[0]
    chances = np.array([case.probability for case in cases])
    means = np.array([belief.mean for belief in beliefs])
    squares = np.array([belief.sd**2 for belief in beliefs]) + means**2
    mean = chances @ means
    return Belief(
        mean,
        np.sqrt(np.maximum(chances @ squares - mean**2, 0.0)),
        float(chances @ [belief.noise for belief in beliefs]),
    )


HIGHEST_RISK = 0.30
"""Candidates with a higher probability of running out of memory aren't proposed for their gain."""

LEAST_GAIN = 0.002
"""A trial is repeated, or run for what it tells, if it is expected to gain at least this share."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """A candidate that is predicted not to fit, and the gain that is expected of trying it."""

    place: int
    worth: float


def unordered_values(pool: Pool) -> dict[str, NDArray[np.bool_]]:
    """Masks of the candidates that have each value of the knobs without an order, by its text.

    Ordered knobs are not probed, because trials of one value also inform about the next.
    """
    return {
        f"{name}={value}": np.array([other == value for other in column])
        for name, column in pool.candidates.columns.items()
        if name not in pool.candidates.coordinates
        for value in dict.fromkeys(column)
    }


def best_probe(
    experience: Experience,
    values: Collection[NDArray[np.bool_]],
    open_: NDArray[np.intp],
    fastest: float,
) -> _Probe | None:
    """The probe that is worth most; None if no value is untested or no probe gains enough.

    A value is untested if none of its candidates was tried and all are predicted not to fit. Its
    probe is the candidate closest to the limit. `values` are the masks of `unordered_values`.
    """
    tried = experience.tried()
    risky = experience.risk_of_all()[open_] > HIGHEST_RISK
    untested = [has[open_] for has in values if not (has & tried).any()]
    untested = [own for own in untested if own.any() and risky[own].all()]
    if not untested or fastest <= 0:
        return None
    speed, size = experience.quantities(open_)
    pool, device_bytes = experience.pool, np.exp(size.mean)
    # The share of its moving memory that each may take to fit; negative if its weights do not.
    loaded = np.minimum(pool.loaded_bytes[open_], device_bytes)
    fits = (pool.usable_bytes - loaded) / np.maximum(device_bytes - loaded, 1.0)
    gain = speed.expected / fastest - 1.0
    best: _Probe | None = None
    for own in untested:
        hopeful = own & (fits > 0)
        most = float(gain[hopeful].max(initial=0.0))
        closest = int(np.argmax(np.where(hopeful, fits, 0.0)))
        # A value is the less likely to be misjudged the more of its memory would have to be wrong.
        worth = float(fits[closest]) ** 2 * most
        if most >= LEAST_GAIN and (best is None or worth > best.worth):
            best = _Probe(int(open_[closest]), worth)
    return best


def never_tried(
    experience: Experience, open_: NDArray[np.intp], fastest: float
) -> tuple[int, int | None]:
    """The number of open candidates predicted not to fit, and the place of the best test of it.

    The test is the candidate with the least memory that would be faster than `fastest`; None if
    none would be.
    """
    places = open_[experience.risk_of_all()[open_] > HIGHEST_RISK]
    speed, size = experience.quantities(places)
    faster = speed.expected > fastest * (1 + LEAST_GAIN)
    least = np.where(faster, size.mean, np.inf)
    return len(places), int(places[np.argmin(least)]) if faster.any() else None


def never_fitted(pool: Pool, experience: Experience) -> list[str]:
    """Notes about values of unordered knobs that always ran out of memory, while others fitted."""
    fitted, ran_out = list(experience.known), list(experience.oom)
    return sorted(
        f"{value} ran out of memory in each of its trials ({has[ran_out].sum()})"
        for value, has in unordered_values(pool).items()
        if fitted and has[ran_out].any() and not has[fitted].any()
    )
