"""The models that a program trains, and those that its files name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tuner.core.errors import InputError
from tuner.program.edit.source import PYTHON, SourceFile
from tuner.program.program import Program
from tuner.program.training import MODEL_KEYS, read_trainings
from tuner.space.models.catalogue import HUB_ID, get_entry

_BELOW = ("name", "path", "id", "name_or_path")


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model as it is named, with the place for people: "train.py:12"."""

    name: str
    where: str


def named_models(program: Program) -> list[NamedModel]:
    """The models that the program trains, or that its files name; each once."""
    found: list[NamedModel] = []
    with contextlib.suppress(InputError):
        for training in read_trainings(program):
            if training.model_by_name:
                found.append(NamedModel(training.model_by_name, training.where))
            for name in ("0", "model_name"):
                argument = training["model"].values.get(name)
                if argument is not None and isinstance(argument.value, str):
                    found.append(NamedModel(argument.value, argument.where))
    found += [one for source in program.sources for one in _in_file(source)]
    named: dict[str, NamedModel] = {}
    for one in found:
        path = program.folder / one.name
        name = str(path) if path.is_dir() else one.name
        if path.is_dir() or get_entry(name) is not None or HUB_ID.fullmatch(name):
            named.setdefault(name, NamedModel(name, one.where))
    return list(named.values())


def _in_file(source: SourceFile) -> Iterator[NamedModel]:
    if source.path.suffix in PYTHON:
        return
    for place in source.places:
        steps = [str(step) for step in place.path[-2:]]
        is_below = len(steps) > 1 and steps[0] == "model" and steps[1] in _BELOW
        is_named = is_below or (steps and steps[-1] in MODEL_KEYS)
        if is_named and isinstance(place.value, str):
            yield NamedModel(place.value, source.at(place))
