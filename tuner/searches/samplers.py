"""Optuna's samplers as a search uses them: over one fixed box of knobs, from a seed.

A decision begins with a sampler of its own, so that chance depends on the seed and the number of
trials and on nothing that happened in this process. Optuna's samplers then look through all
trials for the parameters that these have in common, with a comparison of every distribution:
20 ms at 1,000 trials. Here every trial has the same parameters, which are told instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from tuner.core.errors import InputError
from tuner.core.records import Outcome, Status, TrialRecord
from tuner.predict.training import load_object
from tuner.searches.guided.sampler import MEMORY_CONSTRAINT

Box = Mapping[str, BaseDistribution]


def sampler_of(name: str, *, seed: int, box: Box) -> BaseSampler:
    """The sampler "tpe"; a random one for any other plain name.

    `box` has the parameters of every trial. "package.module:Class" is a class of samplers, made
    with `seed=`. Raises `InputError` where there is none.
    """
    if ":" in name:
        found = load_object(name, "searcher")
        if not (isinstance(found, type) and issubclass(found, BaseSampler)):
            raise InputError(f"searcher {name!r} is no sampler of Optuna's (a BaseSampler)")
        return found(seed=seed)
    if name == "tpe":
        return _Tpe(box, seed)
    return RandomSampler(seed=seed)


class _Tpe(TPESampler):  # type: ignore[misc]
    """All knobs from one split of the trials; knob by knob, each would split them again."""

    def __init__(self, box: Box, seed: int) -> None:
        super().__init__(seed=seed, constant_liar=True, multivariate=True)
        self._box = dict(box)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._box


OUTCOME_CONSTRAINT = "did_not_train"

VIOLATED = 1.0
"""Value of a constraint that is violated by nobody knows how much."""

UNKNOWN_TO_SAMPLER = (Status.CRASHED, Status.INVALID, Status.INTERRUPTED)
"""How a trial can end without saying anything about its configuration."""


@dataclass(frozen=True, slots=True)
class Score:
    """A record as Optuna is told it: throughput, device memory, and constraints (<= 0 is met)."""

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
