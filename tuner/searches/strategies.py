"""Strategies, which choose the next trial of a search: random, a grid, and Optuna's samplers.

The guided search is another one (`tuner.searches.guided.sampler`).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from tuner.core.errors import InputError
from tuner.core.records import Configuration, MemoryBudget, Outcome, Prediction, Status, TrialRecord
from tuner.core.setup.schemas import MemoryOrder
from tuner.predict.training import load_object
from tuner.searches.candidates import Candidates
from tuner.searches.failures import failure_of
from tuner.searches.guided.goals import Goal

METRICS = ["samples_per_s", "device_bytes"]
DIRECTIONS = ["maximize", "minimize"]


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Facts about a search before its first trial.

    `predictions` has one for each candidate, in their order, or none at all. `order` declares which
    knobs only add memory. `goals` replace throughput and memory for "guided", and `budget` is the
    memory that it needs without predictions. `repeats` allows "guided" to measure a configuration
    again; predicted trials tell nothing new.
    """

    predictions: Sequence[Prediction] = ()
    order: MemoryOrder = field(default_factory=MemoryOrder)
    goals: Sequence[Goal] = ()
    budget: MemoryBudget | None = None
    repeats: bool = False


NOTHING = Knowledge()


class Strategy:
    """Chooses trials.

    `chance` is reseeded before each decision, from the seed of the search and the number of trials,
    so that an interrupted search continues as if it had not been interrupted.
    """

    def __init__(self, candidates: Candidates, knowledge: Knowledge, chance: random.Random) -> None:
        self.candidates, self.knowledge, self.chance = candidates, knowledge, chance

    def propose(self) -> Configuration | None:
        """One of `candidates.untried()`; None to end the search."""
        raise ValueError(f"{type(self).__name__} needs a prediction of each candidate")

    def begin(self, configuration: Configuration) -> None:
        """Note that a trial begins; it may have been proposed elsewhere."""

    def tell(self, record: TrialRecord) -> None:
        """Learn from a trial that has begun and ended."""


class _RandomStrategy(Strategy):
    """Draws uniformly.

    Optuna's RandomSampler, moved to the nearest candidate, would favour the edge of the valid set.
    """

    def propose(self) -> Configuration | None:
        """Any untried candidate."""
        self.chance.getrandbits(32)  # searches of earlier versions, with the same seed, drew it too
        return self.chance.choice(self.candidates.untried())


class _GridStrategy(Strategy):
    """Walks the space at even distances, the first configuration included."""

    def __init__(
        self, candidates: Candidates, knowledge: Knowledge, chance: random.Random, *, trials: int
    ) -> None:
        """`trials` is the number of configurations on the grid."""
        super().__init__(candidates, knowledge, chance)
        self._trials = trials

    def propose(self) -> Configuration | None:
        """The next untried candidate on the grid, then the first of the others."""
        every = self.candidates.configurations
        taken = min(self._trials, len(every))
        even = (every[i * len(every) // taken] for i in range(taken))
        return next(filter(self.candidates.is_untried, even), None) or self.candidates.untried()[0]


class _OptunaStrategy(Strategy):
    """An Optuna sampler, used through a study in memory.

    Its proposals are moved to the nearest untried candidate; a moved proposal stays in the study as
    a failed trial, which samplers ignore. Running out of memory is a violated constraint rather
    than a failure, because samplers learn nothing from failures.
    """

    def __init__(
        self,
        candidates: Candidates,
        knowledge: Knowledge,
        chance: random.Random,
        *,
        make: type[BaseSampler] | None = None,
    ) -> None:
        """`make` is a class of samplers, made with `seed=`; TPE without one."""
        super().__init__(candidates, knowledge, chance)
        self._make = make
        self._box = candidates.distributions
        self._study = optuna.create_study(directions=DIRECTIONS)
        # Optuna calls a sampler for enqueued trials too. Some samplers store attributes then, such
        # as NSGA-II the generation; TPE would only take time.
        self._bookkeeper = make(seed=0) if make else RandomSampler(seed=0)
        self._pending: dict[str, optuna.Trial] = {}

    def propose(self) -> Configuration | None:
        """The untried candidate nearest to the proposal of a newly seeded sampler."""
        seed = self.chance.getrandbits(32)
        self._study.sampler = self._make(seed=seed) if self._make else _Tpe(self._box, seed)
        trial = self._study.ask(self._box)
        configuration = self.candidates.nearest_untried(trial.params, self.chance)
        if configuration is not None and self.candidates.parameters(configuration) == trial.params:
            self._pending[configuration.key] = trial
        else:
            self._study.tell(trial, state=TrialState.FAIL)
        return configuration

    def begin(self, configuration: Configuration) -> None:
        """Open a trial for exactly this configuration."""
        if configuration.key not in self._pending:
            self._study.sampler = self._bookkeeper
            self._study.enqueue_trial(self.candidates.parameters(configuration))
            self._pending[configuration.key] = self._study.ask(self._box)

    def tell(self, record: TrialRecord) -> None:
        trial = self._pending.pop(record.configuration.key)
        for name, value in _attributes(record).items():
            trial.set_user_attr(name, value)
        scored = score(record)
        if scored is None:
            self._study.tell(trial, state=TrialState.FAIL)
            return
        for name, violation in scored.constraints.items():
            trial.set_constraint(name, violation)
        self._study.tell(trial, scored.values)


class _Tpe(TPESampler):  # type: ignore[misc]
    """TPE that samples all knobs from one split of the trials, instead of one split per knob.

    Optuna searches all trials for their common parameters, which takes 20 ms with 1,000 trials.
    Here, every trial has the same parameters, `box`.
    """

    def __init__(self, box: Mapping[str, BaseDistribution], seed: int) -> None:
        super().__init__(seed=seed, constant_liar=True, multivariate=True)
        self._box = dict(box)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._box


def strategy_of(
    name: str, candidates: Candidates, knowledge: Knowledge, chance: random.Random, trials: int
) -> Strategy:
    """The strategy of this name, or "package.module:Class". Raises `InputError` for another class.

    "guided" gives a strategy that cannot propose, because it is only used without predictions.
    """
    if ":" in name:
        found = load_object(name, "searcher")
        if isinstance(found, type) and issubclass(found, BaseSampler):
            return _OptunaStrategy(candidates, knowledge, chance, make=found)
        raise InputError(f"searcher {name!r} is no sampler of Optuna's (a BaseSampler)")
    if name == "grid":
        return _GridStrategy(candidates, knowledge, chance, trials=trials)
    made: dict[str, type[Strategy]] = {"tpe": _OptunaStrategy, "random": _RandomStrategy}
    return made.get(name, Strategy)(candidates, knowledge, chance)


def open_mirror(path: Path, name: str) -> Study:
    """An empty study `name` in the journal file at `path`, replacing one of that name.

    The study is derived from the trial journal, whose trials are added again.
    """
    storage = JournalStorage(JournalFileBackend(str(path)))
    if name in optuna.get_all_study_names(storage):
        optuna.delete_study(study_name=name, storage=storage)
    study = optuna.create_study(study_name=name, storage=storage, directions=DIRECTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names(METRICS)
    return study


def mirrored(record: TrialRecord, candidates: Candidates) -> FrozenTrial:
    """The record as a trial of an Optuna study."""
    scored = score(record)
    trial = optuna.trial.create_trial(
        state=TrialState.COMPLETE if scored else TrialState.FAIL,
        values=scored.values if scored else None,
        constraints=scored.constraints if scored else None,
        params=dict(candidates.parameters(record.configuration)),
        distributions=candidates.distributions,
        user_attrs=_attributes(record),
    )
    trial.datetime_start = trial.datetime_complete - timedelta(seconds=record.outcome.duration_s)
    return trial


def _attributes(record: TrialRecord) -> dict[str, str]:
    found = {"trial_id": record.trial_id, "status": str(record.outcome.status)}
    failure = failure_of(record.outcome)
    return found if failure is None else {**found, "failure": failure}


MEMORY_CONSTRAINT = "device_bytes_over_limit"
OUTCOME_CONSTRAINT = "did_not_train"

VIOLATED = 1.0
"""Constraint value when the size of the violation is unknown."""

UNKNOWN_TO_SAMPLER = (Status.CRASHED, Status.INVALID, Status.INTERRUPTED)
"""Statuses of a trial that tell nothing about its configuration."""


@dataclass(frozen=True, slots=True)
class _Score:
    """Numbers of a record for a strategy: throughput, device memory, constraints (<= 0 is met)."""

    values: tuple[float, float]
    constraints: dict[str, float]


def score(record: TrialRecord) -> _Score | None:
    """The score of a record; None if samplers cannot learn from it.

    The memory constraint is the excess over the limit without the margin, in bytes. If the trial
    ran out of memory, the excess is at least the requested bytes.
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
    trained = outcome.status in (Status.OK, Status.OOM)
    # Samplers want the same constraints of every trial.
    constraints = {
        MEMORY_CONSTRAINT: over_bytes,
        OUTCOME_CONSTRAINT: -VIOLATED if trained else VIOLATED,
    }
    return _Score((samples_per_s, device_bytes), constraints)


def _samples_per_s(outcome: Outcome) -> float:
    """Throughput over all stages; that of one stage is scaled by the predicted ratio."""
    evidence = outcome.evidence
    if evidence is None:
        return 0.0
    rate, predicted = evidence.speed.samples_per_s, outcome.prediction
    stage = predicted.stages.get(outcome.stage) if predicted and outcome.stage else None
    if predicted is None or stage is None:
        return rate
    return rate * predicted.speed.samples_per_s / stage.samples_per_s
