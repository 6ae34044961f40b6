"""Predictions of a space's configurations on one GPU, in all stages where the space has some."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.core.errors import InputError
from tuner.core.expressions import show
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, KnobValue, MemoryCategory, Prediction
from tuner.cost.correction import DEVICE, RESERVED
from tuner.cost.speed.profile import DeviceProfile
from tuner.cost.speed.roofline import StepWork
from tuner.predict.predict import check_supported
from tuner.predict.predictor import COMPILED_TOLERANCE, OnProgress, PredictionJob, Predictor
from tuner.predict.stages import Predict, StagedPrediction, predict_stages
from tuner.space import SearchSpace, configure


@dataclass(frozen=True, slots=True)
class Predicted:
    """A configuration and its prediction.

    In a space with stages `staged` predicts each, `prediction` covers all of them, and `hardest` is
    the configuration in the stage that needs most memory.
    """

    configuration: Configuration
    prediction: Prediction
    hardest: Configuration
    staged: StagedPrediction | None = None


class SpacePredictor:
    """Predicts configurations of one space on one GPU; compiles each structure once.

    Predictors of several GPU types share what `predictor` has compiled. Raises `InputError` for a
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
        self.space, self.gpu, self.profile = space, gpu, profile
        self._predictor = predictor or predictor_of(space, workers=workers)
        self._how: dict[str, Any] = {"margin_fraction": margin_fraction, "profile": profile}
        self._on_progress = on_progress

    @property
    def at_once(self) -> int:
        """Number of configurations that `trace` works on at the same time."""
        return self._predictor.at_once

    def answers(self, configuration: Configuration) -> bool:
        """False if only a trace could tell, and PyTorch is not installed."""
        parts = self.space.stage_configurations(configuration) if self.space.stages else None
        each = [configuration] if parts is None else parts.values()
        return all(self._predictor.answers(part, self.gpu) for part in each)

    def details(
        self, configuration: Configuration
    ) -> tuple[list[tuple[int, int, MemoryCategory]], StepWork]:
        """Size, number and category of the blocks at the peak, and the work of a step."""
        return self._predictor.details(configuration, self.gpu)

    def predict(self, configurations: Sequence[Configuration]) -> list[Predicted]:
        """A prediction of each configuration, in their order, from compiled timelines."""
        return self._predict(configurations, self._compiled)

    def trace(self, configurations: Sequence[Configuration]) -> list[Predicted]:
        """As `predict`, from traces at full depth: seconds for each, kept on disk."""
        return self._predict(configurations, self._traced)

    def beside(self, traced: Predicted, configurations: Sequence[Configuration]) -> list[Predicted]:
        """Predictions comparable with that of `traced`, in a fraction of the time of their traces.

        Compiled timelines are moved by the reserved memory that `traced` has beyond its own.
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
                configuration,
                each.overall,
                self.space.stage_configurations(configuration)[each.limiting],
                each,
            )
            for configuration, each in zip(configurations, staged, strict=True)
        ]

    def _traced(self, configurations: Sequence[Configuration]) -> list[Prediction]:
        return self._predictor.traced(configurations, self.gpu, **self._how)

    def _compiled(self, configurations: Sequence[Configuration]) -> list[Prediction]:
        return self._predictor.predict(
            configurations, self.gpu, on_progress=self._on_progress, **self._how
        )


def predictor_of(space: SearchSpace, *, workers: int = 0) -> Predictor:
    """A new predictor of the space's workload and model, for any GPU type."""
    return Predictor(PredictionJob(space.workload, space.predicted_model()), workers=workers)


def _with_reserved(prediction: Prediction, more_bytes: int) -> Prediction:
    """Add reserved memory to a prediction; a negative amount takes it away."""
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
    return replace(
        prediction,
        memory=moved,
        intervals={
            name: (low + more_bytes, high + more_bytes)
            if name in (DEVICE, RESERVED)
            else (low, high)
            for name, (low, high) in prediction.intervals.items()
        },
    )


MOST_TRACED = 8
"""At most this many changes near the limit are traced at full depth: seconds for each."""

REENTRANT = "use_reentrant"

LEAST_SAVING = 0.01
"""Reentrant checkpointing is suggested from this share of saved device memory on."""

Share = tuple[float, float]
"""The lower and upper end of a share."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Other values of one or two knobs, and the prediction with them.

    `lost` is the share of samples/s that it costs (negative for a gain), `saved_bytes` the device
    memory that it frees. `below` are the space's minimums that it no longer meets. `truncated` is
    the share of examples that a change of the length cuts, when their lengths are known.
    """

    settings: Mapping[str, KnobValue]
    configuration: Configuration
    prediction: Prediction
    lost: float
    saved_bytes: int
    below: tuple[str, ...] = ()
    truncated: Share | None = None

    def __str__(self) -> str:
        """As it can be typed after --set."""
        return " ".join(f"{name}={show(value)}" for name, value in self.settings.items())

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "set": {k: list(v) if isinstance(v, tuple) else v for k, v in self.settings.items()},
            "fits": self.prediction.fits,
            "device_bytes": self.prediction.memory.device_bytes,
            "free_bytes": self.prediction.budget.limit_bytes - self.prediction.memory.device_bytes,
            "saved_bytes": self.saved_bytes,
            "samples_per_s": self.prediction.speed.samples_per_s,
            "throughput_lost": self.lost,
            "below_floors": list(self.below),
            "truncated_examples_share": list(self.truncated) if self.truncated else None,
        }


def single_changes(predictor: SpacePredictor, current: Predicted) -> list[Suggestion]:
    """Every other value of each knob that the space and the GPU allow, by throughput lost."""
    return _predicted(predictor, current, alternatives(predictor.space, current.configuration))


def alternatives(space: SearchSpace, configuration: Configuration) -> list[Mapping[str, KnobValue]]:
    """Every other value of each knob of the space."""
    return [
        {name: value}
        for name, values in space.choices.items()
        for value in values
        if value != configuration.get(name)
    ]


def reentrant_change(predictor: SpacePredictor, current: Predicted) -> Suggestion | None:
    """The change to reentrant checkpointing, which trains the same model.

    None when it saves little, or layers are not checkpointed. A space need not have the knob.
    """
    configuration = current.configuration
    if REENTRANT not in predictor.space.terms or configuration.get(REENTRANT) is True:
        return None
    if configuration.get("gradient_checkpointing") is not True:
        return None
    least_bytes = LEAST_SAVING * current.prediction.memory.device_bytes
    found = _predicted(predictor, current, [{REENTRANT: True}])
    return next((change for change in found if change.saved_bytes >= least_bytes), None)


def paired_changes(
    predictor: SpacePredictor, current: Predicted, singles: Sequence[Suggestion]
) -> list[Suggestion]:
    """Pairs of the single changes that save memory, by throughput lost."""
    saving = [change for change in singles if change.saved_bytes > 0]
    settings = [
        {**one.settings, **other.settings}
        for one, other in itertools.combinations(saving, 2)
        if not one.settings.keys() & other.settings.keys()
    ]
    return _predicted(predictor, current, settings)


def _predicted(
    predictor: SpacePredictor, current: Predicted, settings: Sequence[Mapping[str, KnobValue]]
) -> list[Suggestion]:
    possible = allowed(predictor.space, predictor.gpu, current.configuration, settings)
    valid = [each for each in possible if predictor.answers(each[1])]
    found = predictor.beside(current, [configuration for _, configuration in valid])
    changes = sorted(
        (
            _change(predictor.space, current, changed, each)
            for (changed, _), each in zip(valid, found, strict=True)
        ),
        key=_order,
    )
    near = [place for place, change in enumerate(changes) if _near_limit(change)][:MOST_TRACED]
    traced = predictor.trace([changes[place].configuration for place in near])
    for place, each in zip(near, traced, strict=True):
        changes[place] = _change(predictor.space, current, changes[place].settings, each)
    return sorted(changes, key=_order)


def _order(change: Suggestion) -> tuple[float, int, str]:
    return change.lost, change.prediction.memory.device_bytes, str(change)


def _near_limit(change: Suggestion) -> bool:
    """True when a trace at full depth could reverse the verdict of a compiled timeline."""
    usable_bytes = change.prediction.budget.usable_bytes
    off_bytes = abs(change.prediction.memory.device_bytes - usable_bytes)
    return off_bytes <= COMPILED_TOLERANCE * usable_bytes


def allowed(
    space: SearchSpace,
    gpu: Gpu,
    configuration: Configuration,
    settings: Sequence[Mapping[str, KnobValue]],
) -> Iterator[tuple[Mapping[str, KnobValue], Configuration]]:
    """The settings that space and GPU allow beside the configuration, and what each makes of it."""
    held = {n: v for n, v in configuration.items() if n not in space.derived}
    for changed in settings:
        try:
            found = configure(space, {**held, **changed}, strict=False)
        except InputError:
            continue  # excluded by a rule of the space
        if not check_supported(found, gpu):
            yield changed, found


def _change(
    space: SearchSpace, current: Predicted, changed: Mapping[str, KnobValue], found: Predicted
) -> Suggestion:
    before, after = current.prediction, found.prediction
    unmet = [
        text
        for text in space.floors
        if not space.condition(text).holds(found.configuration)
        and space.condition(text).names & changed.keys()
    ]
    return Suggestion(
        settings=dict(changed),
        configuration=found.configuration,
        prediction=after,
        lost=1 - after.speed.samples_per_s / before.speed.samples_per_s,
        saved_bytes=before.memory.device_bytes - after.memory.device_bytes,
        below=tuple(unmet),
        truncated=_truncated(space, found.configuration) if "max_length" in changed else None,
    )


def _truncated(space: SearchSpace, configuration: Configuration) -> Share | None:
    """The share of the examples that is cut; None when their lengths are unknown."""
    lengths = space.data.token_lengths
    if lengths is None:
        return None
    cut = lengths.truncation(int(str(configuration["max_length"]))).share_examples
    return cut.low, cut.high
