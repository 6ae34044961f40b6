"""Predictions of a space's configurations on one GPU, in all stages where the space has some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, MemoryCategory, Prediction
from tuner.cost.calibrate import prior_intervals
from tuner.cost.correction import DEVICE, RESERVED
from tuner.cost.speed.profile import DeviceProfile
from tuner.predict.predictor import OnProgress, PredictionJob, Predictor
from tuner.predict.stages import Predict, predict_stages
from tuner.space import SearchSpace


@dataclass(frozen=True, slots=True)
class Predicted:
    """A configuration and what is predicted of it.

    Where the space has stages, `prediction` is that of all of them, `stage` the one that needs
    most memory, and `hardest` the configuration in it. `epoch_s` and `run_s` are the time of one
    pass over the data of all stages, and of all passes; None where the data is not known.
    """

    configuration: Configuration
    prediction: Prediction
    hardest: Configuration
    stage: str | None = None
    epoch_s: float | None = None
    run_s: float | None = None


class SpacePredictor:
    """Predicts configurations of one space on one GPU; compiles what it has to, once.

    Raises `InputError` for a configuration that the GPU cannot run.
    """

    def __init__(
        self,
        space: SearchSpace,
        gpu: Gpu,
        *,
        margin_fraction: float | None = None,
        profile: DeviceProfile | None = None,
        workers: int = 0,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.space, self.gpu = space, gpu
        self._predictor = Predictor(
            PredictionJob(space.workload, space.predicted_model()), workers=workers
        )
        self._margin_fraction, self.profile = margin_fraction, profile
        self._on_progress = on_progress

    def predict(self, configurations: Sequence[Configuration]) -> list[Predicted]:
        """A prediction of each configuration, in their order, from compiled timelines."""
        return self._predict(configurations, self._compiled)

    def trace(self, configurations: Sequence[Configuration]) -> list[Predicted]:
        """The same from traces at full depth, as a search predicts its front: seconds for each."""
        return self._predict(configurations, self._traced)

    def beside(self, traced: Predicted, configurations: Sequence[Configuration]) -> list[Predicted]:
        """Predictions to set beside that of `traced`, in a fraction of the time of their traces.

        From compiled timelines, with the reserved memory that the trace has more than its own
        compiled timeline.
        """
        compiled, *others = self.predict([traced.configuration, *configurations])
        whole, base = traced.prediction.memory, compiled.prediction.memory
        more_bytes = whole.peak_reserved_bytes - base.peak_reserved_bytes
        return [
            replace(each, prediction=_with_reserved(each.prediction, more_bytes)) for each in others
        ]

    def _predict(self, configurations: Sequence[Configuration], how: Predict) -> list[Predicted]:
        if not self.space.stages:
            found = how(configurations)
            return [Predicted(c, p, c) for c, p in zip(configurations, found, strict=True)]
        staged = predict_stages(self.space, configurations, how)
        return [
            Predicted(
                configuration=configuration,
                prediction=each.overall,
                hardest=self.space.stage_configurations(configuration)[each.limiting],
                stage=each.limiting,
                epoch_s=each.epoch_s,
                run_s=each.run_s,
            )
            for configuration, each in zip(configurations, staged, strict=True)
        ]

    def _traced(self, configurations: Sequence[Configuration]) -> list[Prediction]:
        return self._predictor.traced(
            configurations,
            self.gpu,
            margin_fraction=self._margin_fraction,
            profile=self.profile,
        )

    def _compiled(self, configurations: Sequence[Configuration]) -> list[Prediction]:
        return self._predictor.predict(
            configurations,
            self.gpu,
            margin_fraction=self._margin_fraction,
            profile=self.profile,
            on_progress=self._on_progress,
        )


def _with_reserved(prediction: Prediction, more_bytes: int) -> Prediction:
    """The same with more reserved memory, or with less where it is negative."""
    memory = prediction.memory
    overhead = memory.breakdown[MemoryCategory.ALLOCATOR_OVERHEAD]
    more_bytes = max(more_bytes, -overhead)
    moved = replace(
        memory,
        peak_reserved_bytes=memory.peak_reserved_bytes + more_bytes,
        device_bytes=memory.device_bytes + more_bytes,
        breakdown={
            **memory.breakdown,
            str(MemoryCategory.ALLOCATOR_OVERHEAD): overhead + more_bytes,
        },
    )
    intervals = prior_intervals(moved, prediction.speed, prediction.method)
    return replace(
        prediction,
        memory=moved,
        intervals={
            name: intervals[name] if name in (DEVICE, RESERVED) else ends
            for name, ends in prediction.intervals.items()
        },
    )
