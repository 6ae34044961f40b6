"""The record of a trial that came to an outcome, as a search writes it into its journal."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

from tuner.core.records import Outcome, TrialRecord
from tuner.searches.open_trials import Proposed
from tuner.searches.request import SearchRequest


def record_of(
    request: SearchRequest, proposed: Proposed, begun_at: str | None, outcome: Outcome
) -> TrialRecord:
    """The record of what was proposed; `begun_at` is when its last run began, None for now.

    Where the outcome has no prediction, it gets the one that the request knows.
    """
    configuration, trial_device = proposed.configuration, request.trial_device
    if outcome.prediction is None:
        known = request.predictions.get(configuration.key)
        outcome = dataclasses.replace(outcome, prediction=known)
    return TrialRecord(
        trial_id=f"{request.run_id}-{proposed.number:03d}",
        space=request.space.name,
        gpu=request.gpu.id,
        gpu_memory_bytes=request.gpu.memory_bytes,
        configuration=configuration,
        outcome=outcome,
        seed=request.seed,
        started_at=begun_at or utc_now(),
        versions=request.versions,
        searcher=request.searcher,
        run_id=request.run_id,
        device=trial_device.device if trial_device and not trial_device.emulated else None,
        emulated_device=trial_device.device if trial_device and trial_device.emulated else None,
        memory_limit_bytes=trial_device.memory_limit_bytes if trial_device else None,
        margin_bytes=request.margin_bytes if trial_device else None,
        verification=proposed.instructions.verify,
    )


def utc_now() -> str:
    """The time as records have it: ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
