"""The models that a program, or a file of settings, says that it trains."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.program.arguments import Argument, Found
from tuner.program.edit.source import PYTHON, SourceFile
from tuner.program.keywords import CallReader
from tuner.program.parsed import last_name
from tuner.program.program import Program
from tuner.program.settings import scripts_of
from tuner.program.training import loads_model
from tuner.space.models.catalogue import HUB_ID, get_entry

_KEYS = (
    "base_model", "model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_id",
    "base_model_name", "model_path", "model",
)  # fmt: skip
"""What files and calls name a model by."""

_BELOW = ("name", "path", "id", "name_or_path")
"""What a model is named by below the key `model`."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model as it is named, with the place for people: "train.py:12"."""

    name: str
    where: str


def named_models(program: Program | None, sources: Sequence[SourceFile]) -> list[NamedModel]:
    """The models that the program loads, or that its files and `sources` name; each once.

    A folder is meant from the folder that the program runs in.
    """
    files = {source.path.resolve(): source for source in sources}
    folder = Path() if program is None else program.folder
    found = list(_in_calls(program)) if program is not None else []
    if program is not None:
        files |= {source.path.resolve(): source for source in program.sources}
    found += [one for source in files.values() for one in _in_file(source)]
    named: dict[str, NamedModel] = {}
    for one in found:
        path = folder / one.name
        name = str(path) if path.is_dir() else one.name
        if path.is_dir() or get_entry(name) is not None or HUB_ID.fullmatch(name):
            named.setdefault(name, NamedModel(name, one.where))
    return list(named.values())


def _in_calls(program: Program) -> Iterator[NamedModel]:
    """The models that calls of the program load."""
    reader = CallReader(program, Found())
    for script in scripts_of(program):
        for call in script.calls:
            if not _takes_model(call):
                continue
            keywords = {k.arg: k.value for k in call.keywords}
            given = next((keywords[key] for key in _KEYS if key in keywords), None)
            node = given if given is not None else next(iter(call.args), None)
            if isinstance(node, ast.expr):
                yield from _text(reader.argument(script, node))


def _takes_model(call: ast.Call) -> bool:
    """Whether a call loads a model, or hands the name of one to a trainer."""
    name = last_name(call.func) or ""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    is_model = owner is not None and "Model" in (last_name(owner) or "")
    is_loaded = loads_model(call) or (name == "from_pretrained" and is_model)
    return is_loaded or name.endswith("Trainer") or name == "SentenceTransformer"


def _text(argument: Argument) -> Iterator[NamedModel]:
    if isinstance(argument.value, str) and not argument.is_made:
        yield NamedModel(argument.value, argument.where)


def _in_file(source: SourceFile) -> Iterator[NamedModel]:
    if source.path.suffix in PYTHON:
        return
    for place in source.places:
        steps = [str(step) for step in place.path[-2:]]
        is_named = steps[-1:] and (steps[-1] in _KEYS or _is_below(steps))
        if is_named and isinstance(place.value, str):
            yield NamedModel(place.value, source.at(place))


def _is_below(steps: Sequence[str]) -> bool:
    return len(steps) > 1 and steps[0] == "model" and steps[1] in _BELOW
