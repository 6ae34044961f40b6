"""What a sampler is told of a trial: two values to optimise, and constraints."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.core.records import Outcome, Status, TrialRecord
from tuner.searches.guided.sampler import MEMORY_CONSTRAINT

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
