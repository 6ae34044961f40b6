"""Which changes of one knob, or of two, make a configuration fit, and what they cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.app.predicting import Predicted, SpacePredictor
from tuner.core.errors import InputError
from tuner.core.expressions import show
from tuner.core.records import Configuration, KnobValue, Prediction
from tuner.predict.predict import check_supported
from tuner.predict.predictor import COMPILED_TOLERANCE
from tuner.space import SearchSpace, configure
from tuner.space.lengths import LengthDistribution

MOST_TRACED = 8
"""Changes whose verdict is made sure of, the least costly first: seconds for each."""

REENTRANT = "use_reentrant"
"""The knob of how layers are checkpointed."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Other values of one knob or two, and what the configuration then comes to.

    `lost` is the share of the samples/s that it costs, negative where it gains, and `saved_bytes`
    the device memory that becomes free. `below` are the floors of the space that are no longer
    met: less is then learnt. `truncated` is the share of the examples that is cut, as (low, high),
    where the change is of the length and the lengths of the examples are known.
    """

    settings: Mapping[str, KnobValue]
    configuration: Configuration
    prediction: Prediction
    lost: float
    saved_bytes: int
    below: tuple[str, ...] = ()
    truncated: tuple[float, float] | None = None

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
    """Every other value of every knob alone, by throughput lost, whether it fits or not.

    What the space's rules exclude, and what the GPU cannot run, is left out.
    """
    space = predictor.space
    settings = [
        {name: value}
        for name, values in space.choices.items()
        for value in values
        if value != current.configuration.get(name)
    ]
    return _predicted(predictor, current, settings)


def reentrant_change(predictor: SpacePredictor, current: Predicted) -> Suggestion | None:
    """Reentrant in place of other checkpoints, of which a space need not speak.

    What is learnt stays the same. None where layers are not checkpointed, or are so already.
    """
    configuration = current.configuration
    if REENTRANT not in predictor.space.terms or configuration.get(REENTRANT) is True:
        return None
    if configuration.get("gradient_checkpointing") is not True:
        return None
    return next(iter(_predicted(predictor, current, [{REENTRANT: True}])), None)


def paired_changes(
    predictor: SpacePredictor, current: Predicted, singles: Sequence[Suggestion]
) -> list[Suggestion]:
    """Pairs of those of `singles` that save memory, of two knobs each, by throughput lost."""
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
    valid = list(_valid(predictor, current.configuration, settings))
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
    """Whether a trace at full depth may say otherwise than a compiled timeline of what fits."""
    usable_bytes = change.prediction.budget.usable_bytes
    off_bytes = abs(change.prediction.memory.device_bytes - usable_bytes)
    return off_bytes <= COMPILED_TOLERANCE * usable_bytes


def _valid(
    predictor: SpacePredictor,
    configuration: Configuration,
    settings: Sequence[Mapping[str, KnobValue]],
) -> Iterator[tuple[Mapping[str, KnobValue], Configuration]]:
    space = predictor.space
    held = {n: v for n, v in configuration.items() if n not in space.derived}
    for changed in settings:
        try:
            found = configure(space, {**held, **changed}, strict=False)
        except InputError:
            continue  # excluded by a rule of the space
        if not check_supported(found, predictor.gpu):
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
        truncated=truncated(space, found.configuration) if "max_length" in changed else None,
    )


def truncated(space: SearchSpace, configuration: Configuration) -> tuple[float, float] | None:
    """The share of the examples that is cut, as (low, high); None where no lengths are known."""
    if space.data.token_lengths is None or "max_length" not in configuration:
        return None
    lengths = LengthDistribution.from_token_lengths(space.data.token_lengths)
    share = lengths.truncation(int(str(configuration["max_length"]))).share_examples
    return share.low, share.high
