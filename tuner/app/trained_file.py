"""What a trainer's own file trains, in the words of a search space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tuner.core.errors import InputError
from tuner.core.expressions import show
from tuner.core.records import KnobValue
from tuner.core.setup.common import QUANTIZED
from tuner.program.edit.source import SourceFile
from tuner.program.planned import WORKLOAD, plan_program
from tuner.program.program import trainers_program
from tuner.program.reads import SETTINGS_FILES
from tuner.program.trainer import trainer_of
from tuner.space import SearchSpace
from tuner.space.models.catalogue import get_entry

_MODEL_KEYS = (("base_model",), ("model_name_or_path",))

_OF_THE_SPACE = ("lora_alpha", "max_grad_norm")
"""Knobs without an effect on memory or time: the space's values serve as well."""

_OF_QUANTIZED = ("kbit_preparation", "double_quant", "compute_dtype")
"""Knobs that other models have no use for."""


@dataclass(frozen=True, slots=True)
class TrainedFile:
    """The knobs that a file sets or its trainer has by default, as far as a space has them.

    `outside` is what the file says and no knob of the space can say.
    """

    knobs: Mapping[str, KnobValue]
    outside: tuple[str, ...] = ()


def read_trained(space: SearchSpace, source: SourceFile) -> TrainedFile | None:
    """The training of a file; None where it is not known as the file of a trainer.

    Where the trainer's behaviour is not known, or part of it cannot be predicted, there are no
    knobs, and `outside` says why.
    """
    if space.workload != WORKLOAD or source.path.suffix not in SETTINGS_FILES:
        return None
    if trainer_of(source.places) is None:
        return None
    try:
        plan = plan_program(trainers_program(source), model=space.model, strict=False)
    except InputError as error:
        texts = [str(problem) for problem in error.problems] or [error.message]
        return TrainedFile({}, tuple(texts))
    knobs = {
        name: value
        for name, value in plan.configuration.items()
        if name in plan.known & space.terms.keys() and name not in _OF_THE_SPACE
    }
    outside = [
        *_other_model(space, source),
        *plan.left_out,
        *_beyond(space, knobs, source.path),
    ]
    return TrainedFile(knobs, tuple(outside))


def _other_model(space: SearchSpace, source: SourceFile) -> Iterator[str]:
    """That the file trains another model than the space is about."""
    for place in source.places:
        if place.path not in _MODEL_KEYS or not isinstance(place.value, str):
            continue
        entry = get_entry(place.value)
        if space.model not in (place.value, entry.id if entry else None):
            yield f"{source.at(place)}: {place.value}; the numbers are of {space.model}"


def _beyond(space: SearchSpace, knobs: Mapping[str, KnobValue], path: Path) -> Iterator[str]:
    """Values of the file that no recommendation of the space has."""
    is_quantized = knobs.get("precision") in QUANTIZED
    for name, value in knobs.items():
        if name in _OF_QUANTIZED and not is_quantized:
            continue
        held = space.fixed.get(name)
        said = f"{name} is {show(value)} in {path.name}"
        if held is not None and held != value:
            yield f"{said} and {show(held)} in every configuration of the space"
        elif name not in space.names and value != space.terms[name].default:
            yield f"{said}, and no configuration of the space has it"
