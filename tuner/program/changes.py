"""A program with other values: what changes in its files and on its command line."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tuner.apply.place import Location, NotWritableError
from tuner.apply.source import SourceFile, read_places
from tuner.errors import InputError, Problem
from tuner.expressions import show
from tuner.program.program import Program
from tuner.program.settings import PYTHON, Setting, find_settings
from tuner.records import KnobValue

_BESIDE: Mapping[str, Mapping[str, str]] = {
    "per_device_train_batch_size": {
        "grad_accum": "gradient_accumulation_steps",
        "gradient_checkpointing": "gradient_checkpointing",
        "optimizer": "optim",
    },
    "micro_batch_size": {
        "grad_accum": "gradient_accumulation_steps",
        "gradient_checkpointing": "gradient_checkpointing",
        "optimizer": "optimizer",
    },
}
"""How a setting that a program leaves out is called beside one that it has: the arguments of
transformers' TrainingArguments, and the keys of Axolotl."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Characters `start` to `end` of a file become `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Change:
    """A program and what it becomes."""

    before: Program
    after: Program
    values: Mapping[str, KnobValue]

    @property
    def difference(self) -> str:
        """A unified diff of the files; below it the command, where that changes."""
        texts = [
            _diff(self.before.files[word], self.after.files[word]) for word in self.before.files
        ]
        if self.before.command != self.after.command:
            texts.append(f"-$ {shlex.join(self.before.command)}\n")
            texts.append(f"+$ {shlex.join(self.after.command)}\n")
        return "".join(texts)


def can_change(program: Program, settings: Mapping[str, Setting], knob: str) -> bool:
    """Whether the value of a knob can be written into the program."""
    setting = settings.get(knob)
    if setting is not None:
        return setting.problem is None and setting.value is not None
    return _anchor(program, settings, knob) is not None


def change(
    program: Program, settings: Mapping[str, Setting], values: Mapping[str, KnobValue]
) -> Change:
    """`program` with these values of knobs.

    Raises one `InputError` with everything that cannot be written, each with the line to change
    by hand. What comes out was read again: every value is where the program takes it from.
    """
    edits: dict[str, list[Edit]] = {word: [] for word in program.files}
    words = list(program.command)
    problems = []
    for knob, value in values.items():
        setting = settings.get(knob)
        if setting is not None and setting.value == value:
            continue
        problem = _put(program, settings, knob, value, edits, words)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise InputError("not every value can be written", problems=problems)
    files = {word: _edited(source, edits[word]) for word, source in program.files.items()}
    after = replace(program, command=tuple(words), files=files)
    _require_read_back(find_settings(after), values)
    return Change(program, after, dict(values))


def _put(
    program: Program,
    settings: Mapping[str, Setting],
    knob: str,
    value: KnobValue,
    edits: dict[str, list[Edit]],
    words: list[str],
) -> Problem | None:
    """Note what writes one value; what is in the way, if anything is."""
    setting = settings.get(knob)
    if setting is None:
        return _insert(program, settings, knob, value, edits, words)
    if setting.word is not None:
        head, equals, _ = words[setting.word].partition("=")
        own = equals and re.match(r"[-+]*[A-Za-z_]", head)
        words[setting.word] = f"{head}={show(value)}" if own else show(value)
        return None
    if setting.problem is not None or setting.source is None or setting.location is None:
        by_hand = f"{setting.problem}: set {setting.name} to {show(value)} there by hand"
        return Problem(by_hand, f"{setting.where} {setting.name}")
    place = setting.location
    try:
        text = place.render(value)
    except NotWritableError as error:
        return Problem(str(error), f"{setting.where} {setting.name}")
    word = next(w for w, source in program.files.items() if source is setting.source)
    edits[word].append(Edit(place.start, place.end, place.written(text)))
    return None


def _insert(
    program: Program,
    settings: Mapping[str, Setting],
    knob: str,
    value: KnobValue,
    edits: dict[str, list[Edit]],
    words: list[str],
) -> Problem | None:
    anchor = _anchor(program, settings, knob)
    if anchor is None:
        return Problem(f"nothing in the program sets {knob}: set it to {show(value)} by hand")
    name, at = anchor
    if isinstance(at, int):
        words[at:at] = [f"--{name}", show(value)]
        return None
    word, place = at
    source = program.files[word]
    text = source.data.decode("utf-8")
    edits[word].append(Edit(place.end, place.end, _beside(source, text, place, name, value)))
    return None


def _anchor(
    program: Program, settings: Mapping[str, Setting], knob: str
) -> tuple[str, int | tuple[str, Location]] | None:
    """The name of a knob that is left out, and what it is to stand behind."""
    for anchor, names in _BESIDE.items():
        if knob not in names:
            continue
        for word, source in program.files.items():
            places = [p for p in source.places if p.path and p.path[-1] == anchor]
            if source.path.suffix in PYTHON:
                places = [p for p in places if _is_keyword(source, p)]
            if len({place.start for place in places}) == 1:
                return names[knob], (word, places[0])
        set_by_word = settings.get("micro_batch")
        if set_by_word and set_by_word.word is not None and set_by_word.name == anchor:
            return names[knob], set_by_word.word + 1
    return None


def _is_keyword(source: SourceFile, place: Location) -> bool:
    text = source.data.decode("utf-8")
    line = text[text.rfind("\n", 0, place.start) + 1 : place.start]
    return re.search(rf"\b{place.path[-1]}\s*=\s*$", line) is not None


def _beside(source: SourceFile, text: str, place: Location, name: str, value: KnobValue) -> str:
    """What is put behind the value at `place` to set `name` too."""
    line = text[text.rfind("\n", 0, place.start) + 1 : place.start]
    indent = line[: len(line) - len(line.lstrip())]
    if source.path.suffix in PYTHON:
        literal = repr(value) if not isinstance(value, str) else f'"{value}"'
        alone = re.fullmatch(rf"\s*(\\?\"\s*)?{place.path[-1]}\s*=\s*", line) is not None
        if alone and not place.in_json:
            return f",\n{indent}{name}={literal}"
        return place.written(f", {name}={literal}")
    if source.path.suffix == ".json":
        literal = show(value) if not isinstance(value, str) else f'"{value}"'
        return f',\n{indent}"{name}": {literal}'
    if source.path.suffix == ".toml":
        literal = show(value) if not isinstance(value, str) else f'"{value}"'
        return f"\n{indent}{name} = {literal}"
    return f"\n{indent}{name}: {show(value)}"


def _edited(source: SourceFile, edits: list[Edit]) -> SourceFile:
    if not edits:
        return source
    text = source.data.decode("utf-8")
    for edit in sorted(edits, key=lambda e: e.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    data = text.encode("utf-8")
    return SourceFile(source.path, data, read_places(data, source.path))


def _require_read_back(settings: Mapping[str, Setting], values: Mapping[str, KnobValue]) -> None:
    wrong = []
    for knob, value in values.items():
        found = settings.get(knob)
        if found is None or found.value != value:
            read = "nothing" if found is None or found.value is None else show(found.value)
            wrong.append(Problem(f"{knob} would read as {read}, set to {show(value)}"))
    if wrong:
        raise InputError("the values cannot be written safely", problems=wrong)


def _diff(before: SourceFile, after: SourceFile) -> str:
    if before.data == after.data:
        return ""
    old, new = (source.data.decode("utf-8").splitlines() for source in (before, after))
    lines = difflib.unified_diff(old, new, str(before.path), str(before.path), lineterm="", n=1)
    return "\n".join(lines) + "\n"
