"""Chooses what to try next: an Optuna study over a finite set of configurations.

Optuna is used by ask and tell, so that out of memory can be told as what it is, a violated
constraint, and not as a failure, from which samplers learn nothing.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from tuner.core.records import (
    Configuration,
    MemoryBudget,
    Prediction,
    Status,
    TrialRecord,
)
from tuner.core.setup.schemas import MemoryOrder
from tuner.searches.candidates import Candidates
from tuner.searches.failures import Failures, failure_of
from tuner.searches.guided.experience import HIGHEST_RISK, never_fitted
from tuner.searches.guided.goals import Goal
from tuner.searches.guided.pool import Pool
from tuner.searches.guided.sampler import FAILURE, STATUS, GuidedSampler
from tuner.searches.held_back import MOST_RISK, CalibratedRisk, OomFrontier, PruningLog
from tuner.searches.request import Pruned
from tuner.searches.samplers import sampler_of, score

METRICS = ["samples_per_s", "device_bytes"]
DIRECTIONS = ["maximize", "minimize"]


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known before the first trial.

    `predictions` are one of each candidate, in their order, or none at all; `order` is what the
    workload declares of its knobs and memory; `goals` are what "guided" searches for where that is
    not throughput and memory. `budget` is the memory that there is, which "guided" has to know
    where nothing is predicted.
    """

    predictions: Sequence[Prediction] = ()
    order: MemoryOrder = field(default_factory=MemoryOrder)
    goals: Sequence[Goal] = ()
    budget: MemoryBudget | None = None


NOTHING = Knowledge()


class SamplerAdapter:
    """Proposes configurations of a finite set, each at most once, and learns from records.

    `initial` comes first. `sampler` is one of `SEARCHERS`, or "package.module:Class"; `trials`,
    the budget, is what the spacing of the grid is chosen by. "guided" needs predictions, or the
    memory that there is, and ends when nothing is left that may fit; it can be told without them,
    but not propose. What is proposed depends on the seed and on the records told, in their order,
    and on nothing else: who is told the records of a search that was broken off goes on as it would
    have done.

    What cannot fit is held back: by the order of memory after the trials that ran out of memory,
    and by predictions, corrected by all trials, where there are any. `held_back` says what and
    why, `pruned` since when. A later trial can prove that wrong, and revives it.

    The study holds also what a sampler proposed before it was moved to a valid configuration,
    as failed trials, which samplers pass over. `mirror`, when given, gets the trials that
    really ended and nothing else.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        sampler: str,
        seed: int,
        trials: int,
        initial: Sequence[Configuration] = (),
        mirror: optuna.Study | None = None,
        knowledge: Knowledge = NOTHING,
    ) -> None:
        self.candidates = candidates
        self._frontier = OomFrontier(candidates.configurations, knowledge.order)
        self.guide: GuidedSampler | None = None
        if sampler == "guided" and (knowledge.predictions or knowledge.budget):
            self.guide = GuidedSampler(
                _pool_of(candidates, knowledge), seed=seed, goals=knowledge.goals
            )
        self.study = optuna.create_study(directions=DIRECTIONS)
        self._sampler, self._seed, self._trials = sampler, seed, trials
        # Optuna asks a sampler also for trials that are settled. A class may note something of
        # them, as NSGA-II does their generation; for those with a name here that would be time
        # spent on nothing.
        self._box = candidates.distributions
        self._bookkeeper = sampler_of(sampler if ":" in sampler else "", seed=0, box=self._box)
        columns = {axis.name: candidates.column(axis.name) for axis in candidates.axes}
        self.failures = self.guide.failures if self.guide else Failures(columns)
        self._pruning = PruningLog(candidates, self._frontier)
        self._risk: CalibratedRisk | None = None
        if self.guide is None and sampler != "guided" and knowledge.predictions:
            self._risk = CalibratedRisk(knowledge.predictions)
        self._mirror = mirror
        self._rng = random.Random()  # noqa: S311 - a search, not a secret
        self._initial = tuple(initial)
        self._told = 0
        self._pending: dict[str, optuna.Trial] = {}
        self._draw: Callable[[], Configuration | None] = {
            "random": self._draw_random,
            "grid": self._draw_even,
            "guided": self._draw_guided,
        }.get(sampler, self._draw_sampled)
        self._prune(None)

    def propose(self) -> Configuration | None:
        """The next configuration to run; None when no candidate is left that is worth a trial."""
        if not self.candidates.untried_count:
            return None
        self._begin_decision()
        configuration = self._next_initial() or self._draw()
        if configuration is None:
            return None
        self._begin(configuration)
        return configuration

    def expected_gain(self) -> float | None:
        """The largest gain, as a share, that is expected of a trial; see `GuidedSampler`.

        None where the sampler does not say, or nothing that fits is known to gain upon.
        """
        if self.guide is None:
            return None
        self.guide.learn(self.study.get_trials(deepcopy=False))
        return self.guide.largest_gain()

    def tell(self, record: TrialRecord) -> None:
        """Learn from a trial, whether it was proposed here or in an earlier run.

        Raises KeyError when its configuration is not a candidate.
        """
        configuration = record.configuration
        if configuration.key not in self._pending:
            self._begin(configuration)
        trial = self._pending.pop(configuration.key)
        self._told += 1
        trial.set_user_attr("trial_id", record.trial_id)
        trial.set_user_attr(STATUS, str(record.outcome.status))
        if (failure := failure_of(record.outcome)) is not None:
            trial.set_user_attr(FAILURE, failure)
        scored = score(record)
        if scored is None:
            ended = self.study.tell(trial, state=TrialState.FAIL)
        else:
            for name, value in scored.constraints.items():
                trial.set_constraint(name, value)
            ended = self.study.tell(trial, scored.values)
        if self._mirror is not None:
            self._mirror.add_trial(ended)
        self._mark(record)

    def remember(self, record: TrialRecord) -> None:
        """Take a trial by other versions of libraries as a hint. Call it before any `tell`.

        Only "guided" can weigh it; a study of Optuna's has no trials that count less.
        """
        scored = score(record)
        if self.guide is None or scored is None:
            return
        if record.fits or record.outcome.device_ran_out:
            self.guide.experience.remember(
                self.candidates.place(record.configuration), scored.values
            )

    def held_back(self) -> dict[str, str]:
        """What is not proposed at present, by key, with the reason for people."""
        return self._pruning.reasons()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of candidates that were not tried, as sentences."""
        if self.guide is not None:
            self.guide.learn(self.study.get_trials(deepcopy=False))
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
        """What is and what was held back, with the trials that decided it."""
        return self._pruning.entries

    def _mark(self, record: TrialRecord) -> None:
        """Note on the frontier how memory went, and hold back what cannot fit any more."""
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
        """Judge anew which candidates may fit, once for each outcome."""
        if self.guide is not None:
            self.guide.learn(self.study.get_trials(deepcopy=False))
            closed = self.failures.closed()
            self._pruning.update(self.guide.oom_probability(), HIGHEST_RISK, trial_id, closed)
            held_back = np.any([self._frontier.covered(), *closed.values()], axis=0)
            self.candidates.hold_back(held_back)
            self.guide.hold_back(held_back)  # and weighs the risk of the others by itself
            return
        risk = None if self._risk is None else self._risk.risk()
        held_back = self._pruning.update(risk, MOST_RISK, trial_id, self.failures.closed())
        self.candidates.hold_back(held_back)
        if risk is not None and not self._told and not self.candidates.untried_count:
            # Predictions may be wrong altogether, and something has to be the first.
            held_back[int(np.argmin(risk))] = False
            self.candidates.hold_back(held_back)

    def _begin(self, configuration: Configuration) -> None:
        """Open an Optuna trial for exactly this configuration."""
        self.candidates.take(configuration)
        if configuration.key not in self._pending:
            self.study.sampler = self._bookkeeper
            self.study.enqueue_trial(self.candidates.parameters(configuration))
            self._pending[configuration.key] = self.study.ask(self.candidates.distributions)

    def _begin_decision(self) -> None:
        """Chance begins anew, from the seed and the number of trials so far.

        Otherwise a decision would depend on how many this process has taken before.
        """
        number = self._told + len(self._pending)
        self._rng.seed(f"{self._seed} {number}")
        self.study.sampler = self.guide or sampler_of(
            self._sampler, seed=self._rng.getrandbits(32), box=self._box
        )

    def _next_initial(self) -> Configuration | None:
        return next((c for c in self._initial if self.candidates.is_untried(c)), None)

    def _draw_sampled(self) -> Configuration | None:
        trial = self.study.ask(self.candidates.distributions)
        configuration = self.candidates.nearest_untried(trial.params, self._rng)
        if configuration is not None and self.candidates.parameters(configuration) == trial.params:
            self._pending[configuration.key] = trial
        else:
            self.study.tell(trial, state=TrialState.FAIL)
        return configuration

    def _draw_guided(self) -> Configuration | None:
        if self.guide is None:
            raise ValueError("the guided sampler needs a prediction of each candidate")
        trial = self.study.ask(self.candidates.distributions)
        if self.guide.exhausted:
            self.study.tell(trial, state=TrialState.FAIL)
            return None
        configuration = self.candidates.with_parameters(trial.params)
        self._pending[configuration.key] = trial
        return configuration

    def _draw_random(self) -> Configuration:
        # Not through Optuna's RandomSampler: moving its proposals to the nearest candidate
        # would favour those at the edge of the valid set.
        return self._rng.choice(self.candidates.untried())

    def _draw_even(self) -> Configuration:
        even = _spread(self.candidates.configurations, self._trials)
        return next(filter(self.candidates.is_untried, even), None) or self.candidates.untried()[0]


def _pool_of(candidates: Candidates, knowledge: Knowledge) -> Pool:
    if knowledge.predictions:
        return Pool.of(candidates, knowledge.predictions)
    assert knowledge.budget is not None
    return Pool.blind(candidates, knowledge.order, knowledge.budget)


def open_mirror(path: Path, name: str) -> optuna.Study:
    """An empty study `name` in the journal file at `path`, replacing one of that name.

    The study is derived from the trial journal; what an earlier search left is told again.
    """
    storage = JournalStorage(JournalFileBackend(str(path)))
    if name in optuna.get_all_study_names(storage):
        optuna.delete_study(study_name=name, storage=storage)
    study = optuna.create_study(study_name=name, storage=storage, directions=DIRECTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names(METRICS)
    return study


def _spread(configurations: Sequence[Configuration], count: int) -> Iterable[Configuration]:
    """`count` configurations at even distances through the sequence, the first included."""
    taken = min(count, len(configurations))
    return (configurations[i * len(configurations) // taken] for i in range(taken))
