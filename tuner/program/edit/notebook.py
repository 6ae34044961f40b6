"""A Jupyter notebook's code cells as one Python text, with each character's place in the file.

A `pass` replaces lines for the shell and IPython; cells of `%%bash` and the like are blank.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tuner.core.errors import InputError
from tuner.core.expressions import syntax
from tuner.program.edit.place import Location, is_writable, spot
from tuner.program.edit.python_file import read_python
from tuner.program.edit.write import MAX_BYTES

# What stands for one character: a pair of surrogates does, too.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|[^\\]",
    re.DOTALL,
)
_MAGIC = re.compile(r"\s*([\w.][\w., ]*=\s*)?[!%?]|\s*[\w.]+\?{1,2}\s*$")
_PYTHON_CELL = re.compile(r"\s*%%(time|timeit|capture|prun|memit|py|python3?)\b")
_WRITES = re.compile(
    r"\s*%%(?:writefile|file)[ \t]+(-a[ \t]+|--append[ \t]+)?([^\s$'\"{}]+)[ \t]*\n"
)
_SETS = re.compile(r"(\s*)%(?:env|set_env)[ \t]+(\w+)[ \t=]+([^${}\n]+)\n?$")
_MOST_MAGIC = 500
"""Lines for the shell and IPython that one cell may have."""
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


@dataclass(frozen=True, slots=True)
class _Cell:
    """A code cell: its number in the notebook, from 1 on, and its Python.

    `starts` has the place in the file of each character, and of the end. `run` is the Python that
    runs, with the files that `%%writefile` writes and the variables that `%env` sets.
    """

    number: int
    text: str
    starts: tuple[int, ...]
    run: str = ""


@dataclass(frozen=True, slots=True)
class PythonCode:
    """The Python of a script, or of all code cells of a notebook.

    `starts` has the place in the file of each character, and of the end. `cells` are the numbers of
    the cells by their first lines in `text`; a script has none.
    """

    text: str
    starts: Sequence[int]
    cells: Mapping[int, int] = field(default_factory=dict)

    def place(self, line: int) -> tuple[int, int]:
        """The cell that has a line of `text`, 0 for a script, and the number of the line in it."""
        firsts = list(self.cells)
        before = bisect.bisect_right(firsts, line) - 1
        return (self.cells[firsts[before]], line - firsts[before] + 1) if firsts else (0, line)


def read_notebook(text: str, file: str) -> list[Location]:
    """All values in the code cells, with their cells and lines."""
    python = notebook_python(text, file)
    found = []
    for place in read_python(
        python.text, file, lambda line: f"{file}: {spot(*python.place(line))}"
    ):
        cell, line = python.place(place.line)
        start, end = python.starts[place.start], python.starts[place.end]
        found.append(replace(place, cell=cell, line=line, start=start, end=end))
    return found


def notebook_python(text: str, file: str) -> PythonCode:
    """The code of all cells of a notebook; those that can't be parsed are blank."""
    cells = list(map(_parsed, code_cells(text, file)))
    starts = [start for cell in cells for start in cell.starts[:-1]]
    starts.append(cells[-1].starts[-1] if cells else 0)
    numbers, line = {}, 1
    for cell in cells:
        numbers[line] = cell.number
        line += cell.text.count("\n")
    return PythonCode("".join(cell.text for cell in cells), starts, numbers)


def _parsed(cell: _Cell) -> _Cell:
    try:
        syntax(cell.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return replace(cell, text=re.sub(r"[^\n]", " ", cell.text))
    return cell


def cell_texts(text: str) -> list[str]:
    """The sources of all cells of a notebook, with the lines for the shell and IPython."""
    return ["".join(cell["source"]) for cell in json.loads(text)["cells"]]


def code_cells(text: str, file: str) -> Iterator[_Cell]:
    """The code cells in their order; each text ends with a line break."""
    try:
        cells = _Decoder().decode(text.removeprefix("\ufeff"))["cells"]
        given = [s if isinstance(s := cell["source"], list) else [s] for cell in cells]
        sources = [[part for part in parts if isinstance(part, _Text)] for parts in given]
        if [*map(len, sources)] != [*map(len, given)]:
            raise TypeError("not text")
        is_code = [cell.get("cell_type") == "code" for cell in cells]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{file} is not a Jupyter notebook of version 4") from None
    code = [source if is_one else [] for source, is_one in zip(sources, is_code, strict=True)]
    if sum(len(part) for source in code for part in source) > MAX_BYTES:
        raise InputError(f"{file}: its cells have more than {MAX_BYTES} characters of code")
    before = len(text) - len(text.removeprefix("\ufeff"))
    for number, parts in enumerate(code, 1):
        source = "".join(parts)
        if not source:
            continue
        starts = [
            part.start()
            for one in parts
            for part in _ESCAPE.finditer(text, *(before + place for place in one.span))
        ]
        if len(starts) != len(source) or not is_writable(source):
            raise InputError(f"{file}: the source of cell {number} is not plain text")
        end, kept = before + parts[-1].span[1], _without_magic(source)
        yield _Cell(number, kept + "\n", (*starts, end, end), _as_run(source, kept) + "\n")


class _Text(str):
    """A string of a JSON text, and the characters between its quotation marks."""

    span: tuple[int, int]


class _Decoder(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.parse_string = _parse_string
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def _parse_string(text: str, start: int, strict: bool = True) -> tuple[_Text, int]:
    found, end = json.decoder.scanstring(text, start, strict)  # type: ignore[attr-defined]
    one = _Text(found)
    one.span = (start, end - 1)
    return one, end


def _without_magic(source: str) -> str:
    lines = _LINE.findall(source)
    first = next((n for n, line in enumerate(lines) if line.strip()), 0)
    if lines[first].lstrip().startswith("%%"):
        if not _PYTHON_CELL.match(lines[first]):
            return re.sub(r"[^\n]", " ", source)
        lines[first] = _blanked(lines[first])
    for _ in range(_MOST_MAGIC):
        number = _broken_line("".join(lines))
        while number and not _MAGIC.match(lines[number]) and _goes_on(lines[number - 1]):
            number -= 1
        if number is None or not _MAGIC.match(lines[number]):
            break
        goes_on, lines[number] = _goes_on(lines[number]), _blanked(lines[number])
        while goes_on and number + 1 < len(lines):
            number += 1
            goes_on, lines[number] = _goes_on(lines[number]), re.sub(r"[^\n]", " ", lines[number])
    return "".join(lines)


def _as_run(source: str, text: str) -> str:
    if written := _WRITES.match(source):
        mode, body = "a" if written[1] else "w", source[written.end() :]
        return f"with open({written[2]!r}, {mode!r}) as _file: _file.write({body!r})"
    lines = zip(_LINE.findall(source), _LINE.findall(text), strict=True)
    return "".join(
        f"{found[1]}__import__('os').environ[{found[2]!r}] = {found[3].strip()!r}\n"
        if line != kept and (found := _SETS.match(line))
        else kept
        for line, kept in lines
    )


def _broken_line(source: str) -> int | None:
    """The number of the line that is no Python, from 0 on; lines for the shell never are any."""
    try:
        syntax(source)
    except SyntaxError as error:
        return min(error.lineno or 1, source.count("\n") + 1) - 1
    except (ValueError, RecursionError, MemoryError):
        pass
    return None


def _goes_on(line: str) -> bool:
    return line.rstrip().endswith("\\")


def _blanked(line: str) -> str:
    body = line.rstrip("\n")
    indent = len(body) - len(body.lstrip())
    room = len(body) - indent
    word = "pass" if room >= 4 else "0" if room else ""
    return (" " * indent + word).ljust(len(body)) + line[len(body) :]
