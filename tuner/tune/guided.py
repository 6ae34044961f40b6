"""An Optuna sampler that starts from predictions and hardly ever runs out of memory.

It knows all valid configurations with a prediction of each, learns from every trial how far
predictions are off, and proposes the configuration with the largest expected gain per second
of GPU time among those that will very probably fit.

    sampler = GuidedSampler(pool)
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    trial = study.ask(pool.distributions)

The values of a trial are its throughput and its memory in bytes, in this order. Memory beyond
the limit says "at least the limit": the trial ran out of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from tuner.tune.guided_gain import Front, LogNormal
from tuner.tune.guided_model import DEGREES, Belief, Floats, ResidualModel, features
from tuner.tune.guided_pool import Pool

MEMORY_CONSTRAINT = "device_bytes_over_limit"

OOM_SHARE = 0.02
"""Share of trials that may run out of memory, in expectation."""

HIGHEST_RISK, LOWEST_RISK = 0.30, 0.005
"""Between these lies the probability of running out of memory that a proposal may have,
whatever `OOM_SHARE` leaves for it."""

TRUSTED_TRIALS, LARGEST_SURPRISE = 4.0, 4.0
"""Trials that must contradict the regression's own error before it counts for nothing, and the
most standard deviations that one of them counts as."""

LACK_OF_FIT = 0.015
"""Log throughput by which configurations differ from what their knobs let expect, in kernels
that suit one shape better than the next. The rest of the regression's noise is scatter."""

THROUGHPUT_WEIGHT = 1.0
"""Worth of a share of the best throughput, against the same share of the hypervolume."""

STALE_WEIGHT = 0.25
"""Of a trial by other versions of libraries: as one with twice the standard deviation."""

REFIT_GROWTH = 0.02
"""The regression is repeated when the trials are this share more than the last time."""


class GuidedSampler(BaseSampler):  # type: ignore[misc]
    """Proposes members of a pool, each at most once. See the module."""

    def __init__(
        self,
        pool: Pool,
        *,
        seed: int | None = None,
        oom_share: float = OOM_SHARE,
    ) -> None:
        self.pool = pool
        self._oom_share = oom_share
        self._independent = RandomSampler(seed=seed)
        columns = {name: pool.column(name) for name in pool.distributions}
        self._names = tuple(columns)
        self._index = {self._key(p): i for i, p in enumerate(pool.parameters)}
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
        self._known: dict[int, tuple[float, float]] = {}
        self._stale: dict[int, tuple[float, float]] = {}
        self._oom: set[int] = set()
        self._told: set[int] = set()
        self._taken: set[int] = set()
        self._pending: dict[int, int] = {}
        self._surprises: list[float] = []
        self._spent = 0.0
        self._held_back = np.zeros(len(pool.parameters), dtype=bool)
        self.exhausted = False
        self._fitted = -1
        self._speed = self._speed_model.prior_belief()
        self._memory = self._memory_model.prior_belief()

    # -- Optuna's side ----------------------------------------------------------------------

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """The knobs of the pool."""
        return dict(self.pool.distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The parameters of the best candidate.

        When nothing is left that is worth the risk, `exhausted` is set and `study.optimize` ends
        after this trial, which is drawn at random and teaches nothing. A trial whose parameters
        were settled in advance (`study.enqueue_trial`) needs no decision.
        """
        if "fixed_params" in trial.system_attrs:
            return {}
        self.learn(study.get_trials(deepcopy=False), but=trial.number)
        index = self.best_candidate()
        self.exhausted = index is None
        if index is None:
            self._told.add(trial.number)
            with contextlib.suppress(RuntimeError):  # asked for outside of `study.optimize`
                study.stop()
            return {}
        self._pending[trial.number] = index
        return dict(self.pool.parameters[index])

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """A random value for what is no knob of the pool."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        """Only parameters outside the pool are random."""
        self._independent.reseed_rng()

    def remember(self, index: int, values: tuple[float, float]) -> None:
        """Throughput and memory of a candidate under other circumstances (older libraries).

        They count for the regression, with a wider error, until the candidate is measured
        anew, and for nothing else. To be called before the first trial.
        """
        self._stale[index] = values
        self._fitted = -1  # what was believed without them no longer holds

    # -- learning ---------------------------------------------------------------------------

    def learn(self, trials: Sequence[FrozenTrial], *, but: int | None = None) -> None:
        """Take in every trial that ended since the last time, and those that run, save `but`."""
        for trial in trials:
            number = trial.number
            if number in self._told or number == but:
                continue
            index = self._index.get(self._key(trial.params))
            if trial.state.is_finished():
                self._told.add(number)
                pending = self._pending.pop(number, None)
                if index is None:
                    index = pending
                if index is not None:
                    self._note(index, trial)
            elif index is not None:
                self._pending[number] = index

    def _note(self, index: int, trial: FrozenTrial) -> None:
        self._taken.add(index)
        if trial.state is not TrialState.COMPLETE:
            return
        speed, size = trial.values
        ran_out = size > self.pool.limit_bytes
        if size > 0 and index not in self._known and index not in self._oom:
            self._compare(index, float(self.pool.limit_bytes if ran_out else size), ran_out)
        if ran_out:
            self._oom.add(index)
        elif speed > 0 and size > 0 and not _failed(trial):
            self._known[index] = (speed, size)

    def _compare(self, index: int, device_bytes: float, ran_out: bool) -> None:
        """Note what all trials before this one said of its memory, and what it came to.

        Done when it is told and not when it is proposed, so that trials that an earlier search
        left behind, told again in their order, lead to the same decisions.
        """
        place = np.array([index], dtype=np.intp)
        self._spent += float(self._risk(place)[0])
        _, size = self._quantities(place)
        sd = float(size.sd[0]) / self._caution()
        # How far it was beyond the limit is not known; what counts is that it was.
        surprise = (np.log(device_bytes) - float(size.mean[0])) / sd + (1.0 if ran_out else 0.0)
        self._surprises.append(float(surprise))

    def beliefs(self) -> tuple[Belief, Belief]:
        """What is expected of log(measured / predicted) throughput and memory, of every candidate.

        Learned anew when there are enough new trials to change it.
        """
        count = len(self._known) + len(self._oom)
        if count > self._fitted * (1 + REFIT_GROWTH):
            hints = {i: v for i, v in self._stale.items() if i not in self._known}
            every = {**self._known, **hints}
            seen = np.array(sorted(every), dtype=np.intp)
            trust = np.array([STALE_WEIGHT if i in hints else 1.0 for i in seen])
            oom = np.array(sorted(self._oom), dtype=np.intp)
            none = np.array([], dtype=np.intp)
            pool = self.pool
            known = np.array([every[i] for i in seen]).reshape(-1, 2)
            self._speed = self._speed_model.believe(
                seen,
                np.log(known[:, 0] / pool.samples_per_s[seen]),
                none,
                np.array([]),
                trust=trust,
            )
            self._memory = self._memory_model.believe(
                seen,
                np.log(known[:, 1] / pool.device_bytes[seen]),
                oom,
                np.log(pool.limit_bytes / pool.device_bytes[oom]),
                trust=trust,
            )
            self._fitted = count
        return self._speed, self._memory

    # -- deciding ---------------------------------------------------------------------------

    def best_candidate(self) -> int | None:
        """The place in the pool of what to run next; None when nothing is left that may fit."""
        places = self._open()
        if not places.size:
            return None
        risk = self.oom_probability()[places]
        safe = risk <= self.allowed_risk()
        if not safe.any():
            # Something has to be the first; afterwards there is no need for a gamble.
            return None if self._known else int(places[np.argmin(risk)])
        places, risk = places[safe], risk[safe]
        pool = self.pool
        seconds = (1 - risk) * pool.trial_s[places] + risk * pool.oom_s[places]
        return int(places[np.argmax(self.expected_gain(places) / seconds)])

    def largest_gain(self) -> float | None:
        """The largest gain that is expected of any candidate left, as a share.

        Of the hypervolume, or of the best throughput where that is more. 0 where nothing is left
        that is worth its risk; None while nothing is known to fit.
        """
        front, places = self.front(), self._open()
        if not self._known or not front.speed.size:
            return None
        places = places[self.oom_probability()[places] <= self.allowed_risk()]
        speed, size = self._quantities(places)
        volume = front.expected_gain(speed, size) / max(front.hypervolume, 1e-12)
        fits = size.probability_below(self.pool.usable_bytes)
        faster = fits * speed.expected_above(front.fastest) / front.fastest
        return float(np.maximum(volume, faster).max(initial=0.0))

    def _open(self) -> NDArray[np.intp]:
        """Places of the candidates that were not tried yet and are not held back."""
        open_ = ~self._held_back
        open_[[*self._taken, *self._pending.values()]] = False
        return np.flatnonzero(open_)

    def hold_back(self, mask: NDArray[np.bool_]) -> None:
        """These candidates, and no others, are not to be proposed for now."""
        self._held_back = mask

    def allowed_risk(self) -> float:
        """The probability of running out of memory that the next proposal may have.

        Most proposals have none worth mentioning, which saves up for the few close to the limit.
        """
        trials = len(self._taken) + len(self._pending) + 1
        running = float(self._risk(self._running()).sum())
        spent = max(self._spent, float(len(self._oom))) + running
        left = self._oom_share * trials - spent
        return min(max(left, LOWEST_RISK), HIGHEST_RISK)

    def oom_probability(self) -> Floats:
        """The probability that each candidate runs out of memory."""
        return self._risk(slice(None))

    def _risk(self, places: Any) -> Floats:
        from scipy.special import stdtr

        _, size = self._quantities(places)
        # Student's t: how far trials scatter is known no better than from this many of them.
        degrees = DEGREES + len(self._known)
        short = stdtr(degrees, (size.mean - np.log(self.pool.limit_bytes)) / size.sd)
        return np.asarray(short, dtype=float)

    def expected_gain(self, places: NDArray[np.intp]) -> Floats:
        """Expected gain of the candidates at `places`: shares of hypervolume and of throughput.

        Trials that run count as if they had come to what is expected of them.
        """
        speed, size = self._quantities(places)
        front = self.front()
        volume = max(front.hypervolume, 1e-12) if front.speed.size else 1.0
        gain = front.expected_gain(speed, size) / volume
        fits = size.probability_below(self.pool.usable_bytes)
        faster = speed.expected_above(front.fastest) / (front.fastest or 1.0)
        return np.asarray(gain + THROUGHPUT_WEIGHT * fits * faster)

    def front(self) -> Front:
        """What was measured to fit, and what is expected of the trials that run."""
        speed, size = self._quantities(self._running())
        _, known_speed, known_size = self._estimates()
        return Front.of(
            np.concatenate([known_speed, speed.expected]),
            np.concatenate([known_size, size.expected]),
            usable_bytes=self.pool.usable_bytes,
            reference_bytes=self.pool.limit_bytes,
        )

    def _running(self) -> NDArray[np.intp]:
        return np.array(sorted(set(self._pending.values())), dtype=np.intp)

    def recommend(self) -> int | None:
        """The place of the fastest candidate that was measured to fit; None without one."""
        seen, speed, size = self._estimates()
        speed = np.where(size <= self.pool.usable_bytes, speed, 0.0)
        return int(seen[np.argmax(speed)]) if speed.any() else None

    def _estimates(self) -> tuple[NDArray[np.intp], Floats, Floats]:
        """Places that were measured, their throughput less the scatter of trials, their memory.

        A measured value and what the regression makes of all trials are weighed by how far
        trials scatter and how far configurations differ from the regression.
        """
        seen = np.array(sorted(self._known), dtype=np.intp)
        known = np.array([self._known[i] for i in seen]).reshape(-1, 2)
        belief, _ = self.beliefs()
        scatter = max(belief.noise**2 - LACK_OF_FIT**2, 0.25 * LACK_OF_FIT**2)
        weight = scatter / (scatter + LACK_OF_FIT**2)
        fitted = np.log(self.pool.samples_per_s[seen]) + belief.mean[seen]
        speed = np.exp((1 - weight) * np.log(known[:, 0]) + weight * fitted)
        return seen, speed, known[:, 1]

    def _quantities(self, places: Any) -> tuple[LogNormal, LogNormal]:
        speed, memory = self.beliefs()
        pool = self.pool
        size_sd = memory.sd[places] * self._caution()
        return (
            LogNormal(np.log(pool.samples_per_s[places]) + speed.mean[places], speed.sd[places]),
            LogNormal(np.log(pool.device_bytes[places]) + memory.mean[places], size_sd),
        )

    def _caution(self) -> float:
        """How much wider memory scatters than the regression thinks, by what it said in advance.

        A regression with more features than trials takes scatter for effects of knobs at first.
        """
        squares = np.minimum(np.square(self._surprises), LARGEST_SURPRISE**2)
        mean = (TRUSTED_TRIALS + squares.sum()) / (TRUSTED_TRIALS + len(squares))
        return max(1.0, float(np.sqrt(mean)))

    def _key(self, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(parameters.get(name) for name in self._names)


def _failed(trial: FrozenTrial) -> bool:
    """Whether a constraint other than that of memory is violated."""
    return any(value > 0 for name, value in trial.constraints.items() if name != MEMORY_CONSTRAINT)
