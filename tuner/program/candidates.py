"""Places in a program's files that may set a parameter."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuner.program.edit.place import Location
from tuner.program.edit.python_file import last_name
from tuner.program.edit.source import SourceFile
from tuner.program.names import Script
from tuner.program.parsed import Option
from tuner.program.setting import is_meant, is_other, is_trainers_call, plain, words_of


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place that may be the one of a knob: `strength` is how surely, less is more."""

    name: str
    strength: tuple[int, int]
    source: SourceFile
    place: Location
    script: Script | None = None
    node: ast.expr | None = None
    option: Option | None = None
    trains: bool = False
    """It says itself that it is about the data of the training."""

    @property
    def is_argument(self) -> bool:
        """True for an argument of a trainer's call."""
        return self.script is not None and self.strength[0] == 0


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of settings, and every value in it by its whole path."""

    source: SourceFile
    is_named: bool
    """True if the command names it; a file that only code mentions may also be written by it."""
    places: Sequence[Location]


def in_python(scripts: Sequence[Script], knob: str, names: Sequence[str]) -> Iterator[Candidate]:
    """The candidates in Python files."""
    for script in scripts:
        for place in script.source.places:
            own = str(place.path[-1]).lower() if place.path else ""
            node = script.node_at(place) if own in names else None
            if node is None or isinstance(node, ast.Dict | ast.List | ast.Tuple):
                continue
            kind = _kind(script, place, node)
            around = [*map(str, place.path[:-1]), *script.around(node)]
            call = script.keyword_of(node)
            about = [*around, *_data_of(script, call)]
            if kind is None or is_other(about) or not is_meant(knob, own, around):
                continue
            trains = any("train" in words_of(text) for text in about) or _shuffles(call)
            loader = call is not None and last_name(call.func) == "DataLoader"
            yield Candidate(
                str(place.path[-1]), (kind, names.index(own)), script.source, place, script,
                node, trains=trains and loader,
            )  # fmt: skip
        for option in script.options:
            spelled = {option.dest.lower(), *(plain(n) for n in option.names)}
            for own in [name for name in names if name in spelled and len(name) > 1][:1]:
                place = script.place_of(option.call)
                yield Candidate(
                    own, (2, names.index(own)), script.source, place, script, option=option
                )


def in_data(files: Sequence[DataFile], knob: str, names: Sequence[str]) -> Iterator[Candidate]:
    """The candidates in files of settings."""
    for data in files:
        source = data.source
        is_deepspeed = any(p.path[:1] == ("zero_optimization",) for p in data.places)
        for place in data.places:
            own = str(place.path[-1]).lower() if place.path else ""
            if own not in names or place.value == "auto" or is_collection(place):
                continue
            if is_deepspeed and own == "train_batch_size":
                continue  # of all GPUs and all micro-batches together
            above = [str(step) for step in place.path[:-1]]
            if not is_other(above) and is_meant(knob, own, above):
                name = str(place.path[-1])
                kind = 0 if data.is_named else 2
                yield Candidate(name, (kind, names.index(own)), source, place)


def _kind(script: Script, place: Location, node: ast.expr) -> int | None:
    """The certainty that a place of a Python file is a setting: 0, 1 or 2; None for none."""
    call = script.keyword_of(node)
    if call is None:
        owner = str(place.path[-2]) if len(place.path) > 1 else ""
        return 1 if is_trainers_call(owner) else 2
    called = last_name(call.func) or ""
    if called in ("add_argument", "option", "set_defaults", "field", "Field", "Option"):
        return None  # the option and the attribute are looked at themselves
    if is_trainers_call(called):
        return 0
    is_method = isinstance(call.func, ast.Attribute) and called[:1].islower()
    if is_method and called != "update" and "token" not in called:
        return None  # data.map(..., batch_size=1000)
    return 2


def arguments_of_trainers(source: SourceFile, places: Sequence[Location]) -> list[Location]:
    """The `places` that are arguments of a trainer's call, to which more can be added."""
    script = Script(source)
    found = []
    for place in places:
        node = script.node_at(place)
        call = script.keyword_of(node) if node is not None else None
        if call is None or not is_trainers_call(last_name(call.func) or ""):
            continue
        if all(keyword.arg is not None for keyword in call.keywords):
            found.append(place)
    return found


def _data_of(script: Script, call: ast.Call | None) -> list[str]:
    if call is None or last_name(call.func) != "DataLoader":
        return []
    given = call.args[:1] or [k.value for k in call.keywords if k.arg == "dataset"]
    return [script.shown(node) for node in given]


def _shuffles(call: ast.Call | None) -> bool:
    return call is not None and any(
        k.arg == "shuffle" and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in call.keywords
    )


def is_collection(place: Location) -> bool:
    """True for a place that holds other values."""
    return place.is_list or place.raw[:1] in ("{", "[") or (place.problem or "").startswith("is a ")
