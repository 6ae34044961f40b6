"""Why a configuration does not fit, or how close it is, what would change that, what slows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.app.allocations import PeakAllocation, largest_allocations
from tuner.app.changes import (
    Suggestion,
    paired_changes,
    reentrant_change,
    single_changes,
)
from tuner.app.predicting import Predicted, SpacePredictor
from tuner.app.speed import Note, speed_notes
from tuner.core.records import Configuration, Measurement, Prediction
from tuner.core.records.reading import written
from tuner.cost.operators.timeline import Timeline
from tuner.cost.speed.kernel_times import on_measured_device
from tuner.cost.step_details import OperatorTime
from tuner.predict.memory_timeline import operators_of
from tuner.predict.predict import step_work
from tuner.predict.training import get_workload
from tuner.space.models.catalogue import resolve_config

LEAST_SAVING = 0.01
"""Of the device memory; a smaller saving is not pointed out."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that is known of one configuration on one GPU, without running it.

    `allocations` are the largest at the peak, and `operators` those that take most of a step, in
    the stage that needs most memory. `changes` are all single changes of a knob, by throughput
    lost, whether they fit or not; `pairs` those of two knobs that fit, looked for only where no
    single one does. `reentrant` is the change to reentrant checkpoints, where it saves memory.
    """

    current: Predicted
    allocations: Sequence[PeakAllocation]
    operators: Sequence[OperatorTime]
    changes: Sequence[Suggestion]
    pairs: Sequence[Suggestion]
    notes: Sequence[Note]
    reentrant: Suggestion | None

    @property
    def prediction(self) -> Prediction:
        """The prediction of the configuration."""
        return self.current.prediction

    @property
    def missing_bytes(self) -> int:
        """Device memory that is missing, the margin counted; negative where it fits."""
        p = self.prediction
        return p.memory.device_bytes - p.budget.usable_bytes

    @property
    def fitting(self) -> list[Suggestion]:
        """The single changes that fit."""
        return [change for change in self.changes if change.prediction.fits]

    @property
    def smallest(self) -> Suggestion | None:
        """The single change that needs least."""
        return min(self.changes, key=lambda c: c.prediction.memory.device_bytes, default=None)

    def shares(self) -> list[tuple[str, int, float]]:
        """What the peak consists of: (category, bytes, share), the largest first."""
        memory = self.prediction.memory
        parts = sorted(memory.breakdown.items(), key=lambda part: -part[1])
        return [(name, size, size / memory.device_bytes) for name, size in parts if size]

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        prediction = self.prediction
        return {
            "configuration": self.current.configuration.to_dict(),
            "stage": self.current.stage,
            "fits": prediction.fits,
            "missing_bytes": self.missing_bytes,
            "peak_phase": prediction.memory.peak_phase,
            "breakdown": [
                {"category": name, "bytes": size, "share": share}
                for name, size, share in self.shares()
            ],
            "largest_allocations": [a.to_dict() for a in self.allocations],
            "changes_that_fit": [c.to_dict() for c in self.fitting],
            "pairs_that_fit": [c.to_dict() for c in self.pairs],
            "reentrant_checkpointing": self.reentrant.to_dict() if self.reentrant else None,
            "smallest_change": self.smallest.to_dict() if self.smallest else None,
            "most_expensive_operators": [written(each) for each in self.operators],
            "slowed_by": [note.to_dict() for note in self.notes],
            "prediction": prediction.to_dict(),
        }


def explain(
    predictor: SpacePredictor,
    configuration: Configuration,
    *,
    measured: Mapping[Configuration, Measurement] | None = None,
) -> Explanation:
    """Explain `configuration`. `measured` has what trials of configurations came to.

    Raises `InputError` where the GPU cannot run it at all.
    """
    space, gpu = predictor.space, predictor.gpu
    (current,) = predictor.trace([configuration])
    changes = single_changes(predictor, current)
    pairs: list[Suggestion] = []
    if not current.prediction.fits and not any(c.prediction.fits for c in changes):
        pairs = [c for c in paired_changes(predictor, current, changes) if c.prediction.fits]
    reentrant = reentrant_change(predictor, current)
    if reentrant is not None:
        saved_share = reentrant.saved_bytes / current.prediction.memory.device_bytes
        reentrant = reentrant if saved_share >= LEAST_SAVING else None
    timeline, operators = _traced(predictor, current.hardest)
    return Explanation(
        current=current,
        allocations=largest_allocations(timeline),
        operators=operators,
        changes=changes,
        pairs=pairs,
        reentrant=reentrant,
        notes=speed_notes(
            space,
            configuration,
            current.prediction,
            gpu,
            changes=changes,
            measured=(measured or {}).get(configuration),
        ),
    )


def _traced(
    predictor: SpacePredictor, configuration: Configuration
) -> tuple[Timeline, tuple[OperatorTime, ...]]:
    """A trace of the step at full depth, and its most expensive operators."""
    from tuner.predict.compiler.deepening import trace_deep  # torch

    space = predictor.space
    gpu, times, _ = on_measured_device(predictor.gpu, predictor.profile)
    traced = trace_deep(
        get_workload(space.workload),
        resolve_config(space.predicted_model()),
        configuration,
        compute_capability=gpu.compute_capability,
    )
    return traced.timeline, operators_of(step_work(traced), configuration, gpu, times)
