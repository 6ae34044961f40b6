"""A file that is to be changed: its values, its text with others, and the proof after that."""

from __future__ import annotations

import bisect
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.core.errors import InputError
from tuner.core.records import KnobValue
from tuner.program.edit.notebook import PythonCode, cell_texts, notebook_python, read_notebook
from tuner.program.edit.place import Location, is_wanted
from tuner.program.edit.python_file import read_python
from tuner.program.edit.toml_file import read_toml
from tuner.program.edit.write import read_bytes
from tuner.program.edit.yaml_file import read_json, read_yaml
from tuner.space.apply import KeyPath, show_path

READERS = {
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".json": read_json,
    ".toml": read_toml,
    ".py": read_python,
    ".ipynb": read_notebook,
}

NOTEBOOK = ".ipynb"
PYTHON = (".py", NOTEBOOK)
"""Suffixes of Python: scripts and notebooks."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One value: where it stands, what it is to be, and the characters that say so."""

    place: Location
    value: KnobValue
    text: str


@dataclass(frozen=True, slots=True)
class TextEdit:
    """Characters `start` to `end` of a file become `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it is: its bytes, and every value in it."""

    path: Path
    data: bytes
    places: list[Location]

    @property
    def python(self) -> PythonCode:
        """The Python of a script or a notebook."""
        text = self.data.decode("utf-8")
        if self.path.suffix == NOTEBOOK:
            return notebook_python(text, str(self.path))
        return PythonCode(text, range(len(text) + 1))

    def at(self, place: Location) -> str:
        """A place for people: "config.yaml:12 train.batch"."""
        # The line is unknown for some of a TOML file.
        where = place.where(self.path) if place.line else self.path
        return f"{where} {show_path(place.path)}"

    def line(self, place: Location) -> str:
        """The line that a place begins in, as it stands there."""
        text, at = self.data.decode("utf-8"), place.start
        if place.in_json:
            python = self.python
            text, at = python.text, bisect.bisect_left(python.starts, at)
        start = max(text.rfind("\n", 0, at), text.rfind("\r", 0, at)) + 1
        return re.split(r"[\r\n]", text[start:], maxsplit=1)[0].strip()

    def find(self, key: KeyPath) -> list[Location]:
        """The places that `key` names; a literal with two names counts once.

        In a Python file, keys that are not at the top are looked for in functions; a single name,
        as `batch_size`, must then be unique.
        """
        found = self._find(key)
        if found or self.path.suffix not in PYTHON:
            return found
        inside = self._find(KeyPath(key.steps, anywhere=True))
        return inside if len(key.steps) > 1 or len(inside) == 1 else []

    def _find(self, key: KeyPath) -> list[Location]:
        found: dict[object, Location] = {}
        for place in self.places:
            if key.matches(place.path) or (place.is_alias and key.leads_through(place.path)):
                # Several aliases may lead to the place where their anchor stands.
                span = place.path if place.is_alias else (place.start, place.end)
                found.setdefault(span, place)
        return list(found.values())

    def changed(self, changes: Sequence[Edit]) -> bytes:
        """The bytes of the file with `changes`, which are in the order of their places."""
        places = [(change.place, change.text) for change in changes]
        return self.edited([TextEdit(p.start, p.end, p.written(text)) for p, text in places])

    def edited(self, edits: Sequence[TextEdit]) -> bytes:
        """The bytes of the file with `edits`; those at one place keep their order."""
        text = self.data.decode("utf-8")
        ordered = sorted(edits, key=lambda edit: (edit.start, edit.end))
        for edit in reversed(ordered):
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text.encode("utf-8")

    def reads_as_wanted(self, after: bytes, changes: Sequence[Edit]) -> bool:
        """True if `after` differs in the changed values and in no other."""
        try:
            places = read_places(after, self.path)
        except InputError:
            return False
        changed = {(c.place.start, c.place.end): c for c in changes}
        lists = [p.path for p in self.places if p.is_list and (p.start, p.end) in changed]
        old = [place for place in self.places if not _is_inside(place, lists)]
        new = [place for place in places if not _is_inside(place, lists)]
        return len(old) == len(new) and all(
            _agrees(was, now, changed.get((was.start, was.end)))
            for was, now in zip(old, new, strict=True)
        )


def open_source(path: Path) -> SourceFile:
    """The file at `path`. Raises `InputError` where it cannot be changed."""
    data = read_bytes(path)
    return SourceFile(path, data, read_places(data, path))


def read_places(data: bytes, path: Path) -> list[Location]:
    """Every value of a file, by what its name says it is. Raises `InputError`."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path}: only {', '.join(READERS)} files can be changed safely")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not text in UTF-8") from None
    return reader(text, str(path))


def diff_of(path: Path, before: bytes, after: bytes, context: int = 3) -> str:
    """A unified diff, of a notebook one for each cell ("cell 4"); empty if nothing changes."""
    if before == after:
        return ""
    old, new = before.decode("utf-8"), after.decode("utf-8")
    if path.suffix != NOTEBOOK:
        return _diff(str(path), old, new, context)
    cells = zip(cell_texts(old), cell_texts(new), strict=True)
    return "".join(
        _diff(f"cell {number}", f"{old}\n", f"{new}\n", context)
        for number, (old, new) in enumerate(cells, 1)
    )


def _diff(name: str, before: str, after: str, context: int) -> str:
    old, new = _lines(before), _lines(after)
    lines = difflib.unified_diff(old, new, name, name, lineterm="", n=context)
    return "".join(f"{line}\n" for line in lines)


def _lines(text: str) -> list[str]:
    """The lines as a diff shows them; a last one without an end says so."""
    lines = text.split("\n")
    if lines[-1]:
        lines[-1] += "\n\\ No newline at end of file"
    else:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _is_inside(place: Location, lists: Sequence[tuple[str | int, ...]]) -> bool:
    return any(len(place.path) > len(path) and place.path[: len(path)] == path for path in lists)


def _agrees(was: Location, now: Location, change: Edit | None) -> bool:
    if (was.path, was.document, was.spot) != (now.path, now.document, now.spot):
        return False
    if change is not None:
        return now.raw == change.text.strip() and is_wanted(now.value, change.value)
    # What holds other values shows their changes too; those are compared by themselves.
    is_container = was.is_list or was.problem is not None
    return (was.raw == now.raw and was.problem == now.problem) or (
        is_container and now.is_list == was.is_list and bool(was.problem) == bool(now.problem)
    )


_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\r\n]*", re.MULTILINE)
_WORD = re.compile(r"[a-z]{3,}")


def stale_comments(source: SourceFile, edits: Sequence[Edit]) -> Iterator[str]:
    """Comments with the old value: "train.py:12 still says 4: # batch 4 fits".

    They stand on the line of the value, right above it, or anywhere with a word of the key.
    """
    if source.path.suffix == ".json":
        return  # it has no comments
    python = source.python
    text = python.text
    breaks = [match.start() for match in re.finditer("\n", text)]
    comments = [
        (bisect.bisect_left(breaks, found.start()) + 1, found[0].strip())
        for found in _COMMENT.finditer(text)
    ]
    own_lines = {
        bisect.bisect_left(breaks, found.start()) + 1
        for found in re.finditer(r"^[ \t]*#", text, re.MULTILINE)
    }
    for edit in edits:
        old = edit.place.raw.strip("\"'")
        if not re.search(r"\w", old):
            continue
        start = bisect.bisect_left(python.starts, edit.place.start)
        line = bisect.bisect_left(breaks, start) + 1
        near = {line}
        above = line - 1
        while above in own_lines:
            near.add(above)
            above -= 1
        names = set(_WORD.findall(str(edit.place.path[-1:]).lower()))
        for number, comment in comments:
            if not re.search(rf"(?<![\w.]){re.escape(old)}(?![\w]|\.\d)", comment):
                continue
            if number in near or names & set(_WORD.findall(comment.lower())):
                cell, line = python.place(number)
                at = replace(edit.place, cell=cell, line=line)
                yield f"{at.where(source.path)} still says {old}: {comment}"
