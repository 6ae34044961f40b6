"""Predictions of a space's configurations on one GPU, in all stages where the space has some."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Prediction
from tuner.cost.speed.profile import DeviceProfile
from tuner.predict.predictor import OnProgress, PredictionJob, Predictor
from tuner.predict.stages import Predict, StagedPrediction, predict_stages
from tuner.space import SearchSpace


@dataclass(frozen=True, slots=True)
class Predicted:
    """A configuration and its prediction.

    In a space with stages `staged` predicts each, and `prediction` covers all of them.
    """

    configuration: Configuration
    prediction: Prediction
    staged: StagedPrediction | None = None


class SpacePredictor:
    """Predicts configurations of one space on one GPU; traces each structure once.

    Predictors of several GPU types share what `predictor` has traced. Raises `InputError` for a
    configuration that the GPU cannot run.
    """

    def __init__(
        self,
        space: SearchSpace,
        gpu: Gpu,
        *,
        margin_fraction: float | None = None,
        profile: DeviceProfile | None = None,
        predictor: Predictor | None = None,
        workers: int = 0,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.space, self.gpu = space, gpu
        self._predictor = predictor or predictor_of(space, workers=workers)
        self._how: dict[str, Any] = {"margin_fraction": margin_fraction, "profile": profile}
        self._on_progress = on_progress

    @property
    def at_once(self) -> int:
        """Number of configurations that `trace` works on at the same time."""
        return self._predictor.at_once

    def require_timelines(self, configurations: Sequence[Configuration]) -> None:
        """As that of `Predictor`, for all stages."""
        stages = ([*self.space.stage_configurations(one).values()] for one in configurations)
        pairs = zip(configurations, stages, strict=True)
        every = [each for one, of_it in pairs for each in of_it or [one]]
        self._predictor.require_timelines(every, self.gpu)

    def predict(self, configurations: Sequence[Configuration]) -> list[Predicted]:
        """A prediction of each configuration, in their order; reserved memory is estimated."""
        how = functools.partial(self._predictor.predict, on_progress=self._on_progress)
        return self._predict(configurations, how)

    def trace(self, configurations: Sequence[Configuration]) -> list[Predicted]:
        """As `predict`, with a replay of each: up to a second."""
        return self._predict(configurations, self._predictor.traced)

    def _predict(
        self, configurations: Sequence[Configuration], ask: Callable[..., list[Prediction]]
    ) -> list[Predicted]:
        how: Predict = functools.partial(ask, gpu=self.gpu, **self._how)
        if not self.space.stages:
            found = how(configurations)
            return [Predicted(c, p) for c, p in zip(configurations, found, strict=True)]
        staged = predict_stages(self.space, configurations, how)
        return [
            Predicted(configuration, each.overall, each)
            for configuration, each in zip(configurations, staged, strict=True)
        ]


def predictor_of(space: SearchSpace, *, workers: int = 0) -> Predictor:
    """A new predictor of the space's workload and model, for any GPU type."""
    return Predictor(PredictionJob(space.workload, space.predicted_model()), workers=workers)
