"""A file of a program: its values, each with its place, and its text with other values."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuner.core.errors import InputError
from tuner.core.files import read_file
from tuner.program.edit.notebook import PythonCode, cell_texts, notebook_python, read_notebook
from tuner.program.edit.place import Location
from tuner.program.edit.python_file import read_python
from tuner.program.edit.yaml_file import read_json, read_yaml
from tuner.space.apply import KeyPath, show_path

READERS = {
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".json": read_json,
    ".py": read_python,
    ".ipynb": read_notebook,
}

SETTINGS_FILES = (".yaml", ".yml", ".json")

WORDS = (".toml", ".sh", ".bash")
"""Suffixes of texts that are known by their words only; the program says if a change is right."""

NOTEBOOK = ".ipynb"
PYTHON = (".py", NOTEBOOK)
"""Suffixes of Python: scripts and notebooks."""

MOST_BYTES_OF_SETTINGS = 1024 * 1024
"""The largest settings file; larger ones hold data."""


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
    data: bytes = field(repr=False)

    @property
    def places(self) -> list[Location]:
        """Every value in the file. Raises `InputError` for broken text."""
        return read_places(self.data, self.path)

    @property
    def python(self) -> PythonCode:
        """The Python of a script or a notebook."""
        text = self.data.decode("utf-8")
        if self.path.suffix == NOTEBOOK:
            return notebook_python(text, str(self.path))
        return PythonCode(text, range(len(text) + 1))

    def at(self, place: Location) -> str:
        """A place for people: "config.yaml:12 train.batch"."""
        return f"{place.where(self.path)} {show_path(place.path)}"

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
        found = [place for place in self.places if key.matches(place.path)]
        return list({(place.start, place.end): place for place in reversed(found)}.values())[::-1]

    def edited(self, edits: Sequence[TextEdit]) -> bytes:
        """The bytes of the file with `edits`; those at one place keep their order."""
        text = self.data.decode("utf-8")
        ordered = sorted(edits, key=lambda edit: (edit.start, edit.end))
        for edit in reversed(ordered):
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text.encode("utf-8")


def opened(path: Path) -> SourceFile | None:
    """The file at `path`; None for what holds no settings: a folder, data, broken text."""
    try:
        return checked(SourceFile(path, read_file(path, MOST_BYTES_OF_SETTINGS)))
    except (OSError, ValueError, InputError):
        return None


def checked(source: SourceFile) -> SourceFile:
    """The file itself. Raises `InputError` if its values can't be read."""
    read_places(source.data, source.path)
    return source


@functools.lru_cache(maxsize=256)
def read_places(data: bytes, path: Path) -> list[Location]:
    """Every value of a file, by what its name says it is. Raises `InputError`."""
    if path.suffix.lower() in WORDS:
        return []
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
