"""The code cells of a Jupyter notebook as one Python text, and where each character of it stands.

Lines for the shell and for IPython (`!pip ...`, `%time`) and cells of `%%magic` are no Python: a
`pass` takes their place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from json import JSONDecodeError

from tuner.apply.place import Location
from tuner.apply.python_file import read_python
from tuner.errors import InputError

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)|[^\\]", re.DOTALL)
_MAGIC = re.compile(r"^(\s*)[!%?]")


@dataclass(frozen=True, slots=True)
class Cell:
    """A code cell: its number in the notebook, from 1 on, and its Python.

    `starts` has the place in the file of each character, and one more for the end.
    """

    number: int
    text: str
    starts: tuple[int, ...]


def read_notebook(text: str, file: str) -> list[Location]:
    """Every value in the code cells. Raises `InputError` for what is no notebook."""
    cells = list(code_cells(text, file))
    python = "".join(cell.text for cell in cells)
    starts = [start for cell in cells for start in cell.starts[:-1]]
    starts.append(cells[-1].starts[-1] if cells else 0)
    return [
        replace(place, start=starts[place.start], end=starts[place.end], in_json=True)
        for place in read_python(python, file)
    ]


def code_cells(text: str, file: str) -> Iterator[Cell]:
    """The code cells in their order; each text ends with a line break."""
    try:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (JSONDecodeError, KeyError, TypeError, RecursionError):
        raise InputError(f"{file} is not a Jupyter notebook of version 4") from None
    position = 0
    for number, (cell, source) in enumerate(zip(cells, sources, strict=True), 1):
        if cell.get("cell_type") != "code" or not source:
            continue
        found = _places_of(text, source, position)
        if found is None:
            raise InputError(f"{file}: the source of cell {number} cannot be located")
        position = found[-1]
        yield Cell(number, _without_magic(source) + "\n", (*found, found[-1]))


def _places_of(text: str, source: str, position: int) -> list[int] | None:
    """Where each character of `source`, and its end, stands in `text` from `position` on."""
    while (at := text.find('"source"', position)) >= 0:
        position = at + len('"source"')
        places: list[int] = []
        written, end = "", position
        for string in _STRING.finditer(text, position):
            between = text[places[-1] if places else position : string.start()]
            if places and "]" in between.lstrip('"'):
                break
            for part in _ESCAPE.finditer(text, string.start() + 1, string.end() - 1):
                places.append(part.start())
            end = string.end() - 1
            written += json.loads(string[0])
            if len(written) >= len(source) or not source.startswith(written):
                break
        if written == source and len(places) == len(source):
            return [*places, end]
    return None


def _without_magic(source: str) -> str:
    """The same with as many characters, all of them Python."""
    lines = source.splitlines(keepends=True)
    whole = lines[0].lstrip().startswith("%%")
    return "".join(_blanked(line) if whole or _MAGIC.match(line) else line for line in lines)


def _blanked(line: str) -> str:
    body = line.rstrip("\n")
    indent = len(body) - len(body.lstrip())
    word = "pass" if len(body) - indent >= 4 else ""
    return (" " * indent + word).ljust(len(body)) + line[len(body) :]
