"""Proposes the next trial of a search, and holds back candidates that cannot fit or would fail."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from optuna.study import Study

from tuner.core.records import (
    Configuration,
    Status,
    TrialRecord,
)
from tuner.searches.candidates import Candidates
from tuner.searches.failures import Failures, failure_of
from tuner.searches.guided.experience import HIGHEST_RISK, never_fitted
from tuner.searches.guided.pool import Pool
from tuner.searches.guided.sampler import Guided, GuidedStrategy
from tuner.searches.held_back import MOST_RISK, CalibratedRisk, OomFrontier, PruningLog
from tuner.searches.request import Pruned
from tuner.searches.strategies import NOTHING, Knowledge, Strategy, mirrored, score, strategy_of


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
        self._frontier = OomFrontier(candidates.configurations, knowledge.order)
        self._chance = random.Random()  # noqa: S311 - a search, not a secret
        self.guide: Guided | None = None
        if sampler == "guided" and (knowledge.predictions or knowledge.budget):
            self.guide = Guided(
                _pool_of(candidates, knowledge),
                goals=knowledge.goals,
                repeats=knowledge.repeats,
            )
            self._strategy: Strategy = GuidedStrategy(candidates, self.guide)
        else:
            self._strategy = strategy_of(sampler, candidates, knowledge, self._chance, trials)
        self.failures = self.guide.failures if self.guide else Failures(candidates.columns)
        self._pruning = PruningLog(candidates, self._frontier)
        self._risk: CalibratedRisk | None = None
        if self.guide is None and sampler != "guided" and knowledge.predictions:
            self._risk = CalibratedRisk(knowledge.predictions)
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
        if self.guide is None:
            return None
        return self.guide.largest_gain()

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

    def spared(self) -> tuple[int, float | None]:
        """The number of configurations that are held back, and the predicted time of their trials.

        The time is the least that they would take: seconds to start and to load each, after which
        it runs out of memory. It is None if the times of trials are not predicted.
        """
        places = self._pruning.untried()
        number = int(places.sum())
        if self.guide is None or self.guide.pool.is_blind:
            return number, None
        return number, float(self.guide.pool.oom_s[places].sum())

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


def _pool_of(candidates: Candidates, knowledge: Knowledge) -> Pool:
    if knowledge.predictions:
        return Pool.of(candidates, knowledge.predictions)
    assert knowledge.budget is not None
    return Pool.blind(candidates, knowledge.order, knowledge.budget)
