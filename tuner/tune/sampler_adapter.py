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
import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from tuner.records import Configuration, Outcome, Prediction, Status, TrialRecord
from tuner.results.pruned import Pruned
from tuner.tune.candidates import Candidates
from tuner.tune.guided import HIGHEST_RISK, MEMORY_CONSTRAINT, GuidedSampler
from tuner.tune.guided_goals import Goal
from tuner.tune.guided_pool import Pool
from tuner.tune.oom_frontier import OomFrontier
from tuner.tune.pruning import MOST_RISK, CalibratedRisk, PruningLog
from tuner.tune.samplers import sampler_of
from tuner.workloads.memory_order import MemoryOrder

METRICS = ["samples_per_s", "device_bytes"]
DIRECTIONS = ["maximize", "minimize"]
OUTCOME_CONSTRAINT = "did_not_train"

VIOLATED = 1.0
"""Value of a constraint that is violated by nobody knows how much."""

UNKNOWN_TO_SAMPLER = (Status.CRASHED, Status.INVALID, Status.INTERRUPTED)
"""How a trial can end without saying anything about its configuration."""


@dataclass(frozen=True, slots=True)
class Score:
    """A record as Optuna is told it: the values of `METRICS`, and constraints (<= 0 is met)."""

    values: tuple[float, float]
    constraints: dict[str, float]


def score(record: TrialRecord) -> Score | None:
    """What a sampler can learn from the record; None when that is nothing.

    Memory is violated by the bytes, with the margin, beyond the limit. Where memory ran out
    and no peak is known, at least the bytes asked for were missing.
    """
    outcome, limit_bytes = record.outcome, record.budget.limit_bytes
    if outcome.status in UNKNOWN_TO_SAMPLER:
        return None
    evidence = outcome.evidence
    over_bytes = VIOLATED
    device_bytes = float(limit_bytes)
    if evidence is not None:
        device_bytes = float(evidence.memory.device_bytes)
        over_bytes = device_bytes - record.budget.usable_bytes
    if outcome.status is Status.OOM:
        # A measured peak of a trial that ran out stays below the limit: it is no evidence
        # of a fit.
        over_bytes = max(over_bytes, float(outcome.requested_bytes or 0), VIOLATED)
        device_bytes = max(device_bytes, limit_bytes + over_bytes)
    samples_per_s = _samples_per_s(outcome)
    constraints = {MEMORY_CONSTRAINT: over_bytes}
    if outcome.status not in (Status.OK, Status.OOM):
        constraints[OUTCOME_CONSTRAINT] = VIOLATED
    return Score((samples_per_s, device_bytes), constraints)


def _samples_per_s(outcome: Outcome) -> float:
    """Throughput, of all stages; from one stage alone as the prediction relates it to all."""
    evidence = outcome.evidence
    if evidence is None:
        return 0.0
    rate, predicted = evidence.speed.samples_per_s, outcome.prediction
    stage = predicted.stages.get(outcome.stage) if predicted and outcome.stage else None
    if predicted is None or stage is None:
        return rate
    return rate * predicted.speed.samples_per_s / stage.samples_per_s


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known before the first trial.

    `predictions` are one of each candidate, in their order, or none at all; `order` is what the
    workload declares of its knobs and memory; `goals` are what "guided" searches for where that is
    not throughput and memory.
    """

    predictions: Sequence[Prediction] = ()
    order: MemoryOrder = field(default_factory=MemoryOrder)
    goals: Sequence[Goal] = ()


NOTHING = Knowledge()


class SamplerAdapter:
    """Proposes configurations of a finite set, each at most once, and learns from records.

    `initial` comes first. `sampler` is one of `SEARCHERS`, or "package.module:Class"; `trials`,
    the budget, is what the spacing of the grid is chosen by. "guided" needs predictions, and ends
    when nothing is left that may fit; it can be told without them, but not propose. What is
    proposed depends on the seed and on the records told, in their order, and on nothing else: who
    is told the records of a search that was broken off goes on as it would have done.

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
        if sampler == "guided" and knowledge.predictions:
            self.guide = GuidedSampler(
                Pool.of(candidates, knowledge.predictions), seed=seed, goals=knowledge.goals
            )
        self.study = optuna.create_study(directions=DIRECTIONS)
        self._sampler, self._seed, self._trials = sampler, seed, trials
        # Optuna asks a sampler also for trials that are settled. A class may note something of
        # them, as NSGA-II does their generation; for those with a name here that would be time
        # spent on nothing.
        self._box = candidates.distributions
        self._bookkeeper = sampler_of(sampler if ":" in sampler else "", seed=0, box=self._box)
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
        trial.set_user_attr("status", str(record.outcome.status))
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
        self._prune(record.trial_id)

    def _prune(self, trial_id: str | None) -> None:
        """Judge anew which candidates may fit, once for each outcome."""
        if self.guide is not None:
            self.guide.learn(self.study.get_trials(deepcopy=False))
            self._pruning.update(self.guide.oom_probability(), HIGHEST_RISK, trial_id)
            covered = self._frontier.covered()
            self.candidates.hold_back(covered)
            self.guide.hold_back(covered)  # and weighs the risk of the others by itself
            return
        risk = None if self._risk is None else self._risk.risk()
        held_back = self._pruning.update(risk, MOST_RISK, trial_id)
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
