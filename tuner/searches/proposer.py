"""Proposes the next trial of a search, and holds back candidates that cannot fit or would fail."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray
from optuna.study import Study

from tuner.core.records import Configuration, Prediction, Status, TrialRecord
from tuner.core.setup.schemas import MemoryOrder
from tuner.cost.calibrate import calibrations_from
from tuner.searches.candidates import Candidates
from tuner.searches.failures import Failures, failure_of
from tuner.searches.guided.experience import HIGHEST_RISK, never_fitted
from tuner.searches.guided.pool import Pool
from tuner.searches.guided.sampler import Guided, GuidedStrategy
from tuner.searches.request import Pruned
from tuner.searches.strategies import NOTHING, Knowledge, Strategy, mirrored, score, strategy_of

Places = NDArray[np.intp]


class _OomFrontier:
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
        # All that are at least as large, itself included.
        members = self._members[self._group[place]]
        larger: Places = members[(self._places[members] >= self._places[place]).all(axis=1)]
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


MOST_RISK = 0.5
"""Candidates are not tried if their probability of not fitting is above this. It limits samplers
that know nothing about memory; "guided" has a lower limit."""

REFIT_GROWTH = 0.05
"""The calibration is repeated when the number of trials has grown by this share."""

KNOWN_OOM, RISK, FAILS = 1, 2, 3
"""Why a configuration is held back; 0 where it is not."""


class _CalibratedRisk:
    """The probability that each candidate does not fit, from predictions corrected by trials."""

    def __init__(self, predictions: Sequence[Prediction]) -> None:
        self._predictions = predictions
        self._records: list[TrialRecord] = []
        self._fitted = -1
        self._risk = np.zeros(0)

    def tell(self, record: TrialRecord) -> None:
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


class _PruningLog:
    """The candidates that are held back now, and those that were revived."""

    def __init__(self, candidates: Candidates, frontier: _OomFrontier) -> None:
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


class Proposer:
    """Proposes configurations of a finite set, and learns from records.

    Each is proposed once, but for those that `guided` measures again where repeats are allowed.

    It proposes `initial` first; then the strategy `sampler` chooses, one of `SEARCHERS` or
    "package.module:Class". `trials`, the budget, determines the spacing of the grid. "guided" needs
    predictions or the memory budget; without both it can learn but not propose. Proposals depend
    only on the seed and on the records told, in their order, so that an interrupted search
    continues as if it had not been interrupted.

    Configurations that cannot fit are held back, by the memory order after trials that ran out of
    memory, and by predictions, if any, which all trials correct. `pruned` has the reasons, and the
    trials that decided. A later trial can revive a configuration.

    The Optuna study `mirror` gets the trials that ended.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        sampler: str,
        seed: int,
        trials: int,
        initial: Sequence[Configuration] = (),
        mirror: Study | None = None,
        knowledge: Knowledge = NOTHING,
    ) -> None:
        self.candidates = candidates
        self._frontier = _OomFrontier(candidates.configurations, knowledge.order)
        self._chance = random.Random()  # noqa: S311 - a search, not a secret
        self.guide: Guided | None = None
        if sampler == "guided" and (knowledge.predictions or knowledge.budget):
            if knowledge.predictions:
                pool = Pool.of(candidates, knowledge.predictions)
            else:
                assert knowledge.budget is not None
                pool = Pool.blind(candidates, knowledge.order, knowledge.budget)
            self.guide = Guided(pool, goals=knowledge.goals, repeats=knowledge.repeats)
            self._strategy: Strategy = GuidedStrategy(candidates, self.guide)
        else:
            self._strategy = strategy_of(sampler, candidates, knowledge, self._chance, trials)
        self.failures = self.guide.failures if self.guide else Failures(candidates.columns)
        self._pruning = _PruningLog(candidates, self._frontier)
        self._risk: _CalibratedRisk | None = None
        if self.guide is None and sampler != "guided" and knowledge.predictions:
            self._risk = _CalibratedRisk(knowledge.predictions)
        self._mirror = mirror
        self._seed = seed
        self._initial = tuple(initial)
        self._told = 0
        self._pending: set[str] = set()
        self._prune(None)

    def propose(self) -> Configuration | None:
        """The next configuration to run; None if no remaining candidate is worth a trial."""
        may_repeat = self.guide is not None and self.guide.repeats
        if not self.candidates.untried_count and not may_repeat:
            return None
        # Reseed: a decision must not depend on the number of decisions in this process.
        self._chance.seed(f"{self._seed} {self._told + len(self._pending)}")
        first = next((c for c in self._initial if self.candidates.is_untried(c)), None)
        configuration = first or self._strategy.propose()
        if configuration is None:
            return None
        self._begin(configuration)
        return configuration

    def expected_gain(self) -> float | None:
        """The largest expected gain of a trial, as a share; see `Guided`.

        None if the sampler does not estimate it, or if no configuration is known to fit.
        """
        return None if self.guide is None else self.guide.largest_gain()

    def tell(self, record: TrialRecord, pooled: TrialRecord | None = None) -> None:
        """Learn from a trial that was proposed here or in an earlier run.

        `pooled` combines it with earlier trials of its configuration: "guided" weighs each by
        itself, the others take them for one. Raises KeyError if its configuration is not a
        candidate.
        """
        record = record if pooled is None or self.guide is not None else pooled
        configuration = record.configuration
        if configuration.key not in self._pending:
            self._begin(configuration)
        self._pending.discard(configuration.key)
        self._told += 1
        self._strategy.tell(record)
        if self._mirror is not None:
            self._mirror.add_trial(mirrored(record, self.candidates))
        self._mark(record)

    def remember(self, record: TrialRecord) -> None:
        """Take a trial with other library versions as a hint. Call it before any `tell`.

        Only "guided" uses it; an Optuna study has no trials of lower weight.
        """
        scored = score(record)
        if self.guide is None or scored is None:
            return
        if record.fits or record.outcome.device_ran_out:
            self.guide.experience.remember(
                self.candidates.place(record.configuration), scored.values
            )

    @property
    def held_back(self) -> int:
        """The number of configurations that are not tried because they would fail."""
        return int(self._pruning.untried().sum())

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user about candidates that were not tried."""
        closed = {
            reason: f"{reason}; not tried again: {self._number(mask)}"
            for reason, mask in self.failures.closed().items()
        }
        others = [told for told in self.failures.suspected() if told not in closed]
        return (*closed.values(), *others, *self._never_tried())

    def _never_tried(self) -> list[str]:
        if self.guide is None:
            return []
        out = never_fitted(self.guide.pool, self.guide.experience)
        number, would_tell = self.guide.untried()
        if not number or self.guide.pool.is_blind:
            return out
        text = f"{number} configurations were never tried, as they are predicted not to fit; "
        if would_tell is None:
            return [*out, f"{text}none of them would be faster"]
        return [*out, f"{text}a trial of {self.candidates.describe(would_tell)} would tell"]

    def _number(self, mask: npt.NDArray[np.bool_]) -> str:
        left = sum(map(self.candidates.is_left, np.flatnonzero(mask).tolist()))
        return f"{left} configuration{'s' * (left != 1)}"

    @property
    def pruned(self) -> tuple[Pruned, ...]:
        """The configurations that are or were held back, with the trials that decided it."""
        return self._pruning.entries

    def _mark(self, record: TrialRecord) -> None:
        """Update what is known about memory and failures, and the candidates that are held back."""
        place = self.candidates.place(record.configuration)
        if record.outcome.device_ran_out:
            self._frontier.ran_out(place)
        elif record.outcome.status is Status.OK:
            self._frontier.fitted(place)
        if self._risk is not None:
            self._risk.tell(record)
        failure = failure_of(record.outcome)
        if self.guide is None and failure is not None:
            self.failures.failed(place, failure)
        elif self.guide is None and record.outcome.status is Status.OK:
            self.failures.ran(place)
        self._prune(record.trial_id)

    def _prune(self, trial_id: str | None) -> None:
        """Update which candidates are held back, once for each outcome."""
        if self.guide is not None:
            closed = self.failures.closed()
            self._pruning.update(self.guide.oom_probability(), HIGHEST_RISK, trial_id, closed)
            held_back = np.any([self._frontier.covered(), *closed.values()], axis=0)
            self.candidates.hold_back(held_back)
            self.guide.hold_back(held_back)  # which weighs the others' risk itself
            return
        risk = None if self._risk is None else self._risk.risk()
        held_back = self._pruning.update(risk, MOST_RISK, trial_id, self.failures.closed())
        self.candidates.hold_back(held_back)
        if risk is not None and not self._told and not self.candidates.untried_count:
            # All predictions may be wrong, so the least risky candidate may run first.
            held_back[int(np.argmin(risk))] = False
            self.candidates.hold_back(held_back)

    def _begin(self, configuration: Configuration) -> None:
        self.candidates.take(configuration)
        if configuration.key not in self._pending:
            self._pending.add(configuration.key)
            self._strategy.begin(configuration)
