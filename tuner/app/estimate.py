"""The memory and speed of one configuration on one GPU, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.app.target import with_model
from tuner.core.errors import InputError
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Memory, Prediction, Speed
from tuner.core.units import format_size, significant
from tuner.cost.speed.profile import DeviceProfile
from tuner.predict.stages import StagedPrediction, predict_stages
from tuner.space import SearchSpace, configure, default_space, load_space
from tuner.space.models.trainable import model_defaults
from tuner.trial.base import outcome_versions


@dataclass(frozen=True, slots=True, repr=False)
class Estimate:
    """What is predicted of one configuration; `stages` says it of each, where there are some.

    `corrected_by` is the number of trials whose measurements corrected the prediction
    (`tuner.app.correcting`); `prediction.corrections` has the factors.
    """

    space: SearchSpace
    configuration: Configuration
    gpu: Gpu
    prediction: Prediction
    stages: StagedPrediction | None = None
    corrected_by: int = 0

    @property
    def fits(self) -> bool:
        """Whether its memory and the margin are within the GPU's memory, in every stage."""
        return self.prediction.fits

    @property
    def memory(self) -> Memory:
        """Peak memory in bytes, and what it consists of; of the stage that needs most."""
        return self.prediction.memory

    @property
    def speed(self) -> Speed:
        """Seconds an optimizer step, samples and tokens a second."""
        return self.prediction.speed

    def __repr__(self) -> str:
        """In short: a space and all its settings would fill the screen."""
        return f"<Estimate of {self.space.name} on {self.gpu.id}: {self}>"

    def __str__(self) -> str:
        used, limit = self.memory.device_bytes, self.prediction.budget.limit_bytes
        fits = "fits" if self.fits else "does not fit"
        return (
            f"{fits}, {format_size(used)} of {format_size(limit)}, "
            f"{significant(self.speed.samples_per_s)} samples/s (predicted)"
        )

    def to_dict(self) -> dict[str, Any]:
        """As `tuner estimate --json` prints it."""
        values: dict[str, Any] = {
            "space": self.space.name if self.space.path is not None else None,
            "model": self.space.model,
            **self.prediction.to_dict(),
            "corrected_by": self.corrected_by,
            "configuration": self.configuration.to_dict(),
            "versions": outcome_versions(),
        }
        if self.stages is None:
            return values
        return {
            **values,
            "limiting_stage": self.stages.limiting,
            "misfits": list(self.stages.misfits),
            "epoch_s": self.stages.epoch_s,
            "run_s": self.stages.run_s,
            "stages": {name: one.to_dict() for name, one in self.stages.stages.items()},
        }


def one_configuration(
    named: str | SearchSpace | None, model: str | None, settings: Mapping[str, Any]
) -> tuple[SearchSpace, Configuration]:
    """The configuration that a space or a model and settings name, with its space.

    Without a space it is that of a LoRA training with defaults for all that is not set.
    """
    if named is not None:
        space = with_model(load_space(named) if isinstance(named, str) else named, model)
    elif model is not None:
        settings = {**model_defaults(model), **settings}
        space = default_space(model, settings)
    else:
        raise InputError("no search space and no model is named", hint="name one of them")
    return space, configure(space, settings, strict=False)


def estimate_configuration(
    space: SearchSpace,
    configuration: Configuration,
    gpu: Gpu,
    *,
    margin_fraction: float | None = None,
    profile: DeviceProfile | None = None,
) -> Estimate:
    """The prediction of one configuration, of each stage and of all together where there are some.

    From traces at full depth, as a search has them for its front: seconds for each, kept on disk.

    Raises `InputError`, with everything that is wrong, when the GPU cannot run it.
    """
    from tuner.app.search.supported import require_supported
    from tuner.predict.predictor import PredictionJob, Predictor

    stages = [*space.stage_configurations(configuration).values()]
    for values in stages or [configuration]:
        require_supported(values, gpu)
    predictor = Predictor(PredictionJob(space.workload, space.predicted_model()))

    def predict(configurations: Sequence[Configuration]) -> list[Prediction]:
        return predictor.traced(
            configurations, gpu, margin_fraction=margin_fraction, profile=profile
        )

    if not stages:
        return Estimate(space, configuration, gpu, predict([configuration])[0])
    staged = predict_stages(space, [configuration], predict)[0]
    return Estimate(space, configuration, gpu, staged.overall, staged)
