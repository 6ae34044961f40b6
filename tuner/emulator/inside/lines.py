"""Finds the line of code that caused something: the program's own, and the library's."""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

from tuner.emulator.inside.rounds import called_in

_OURS = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_STANDARD = tuple(
    f"{os.path.realpath(sysconfig.get_path(name))}{os.sep}" for name in ("stdlib", "platstdlib")
)
_PACKAGES = ("site-packages", "dist-packages")
_TORCH = "torch"
_PYTHON = "python"
# Code from torch.compile, in a cache anywhere: a hash, in a folder of the hash's first letters.
_INDUCTOR = re.compile(r"/(?P<start>[a-z0-9]{2})/c(?P=start)[a-z2-7]{40,}\.py$")


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return Path(os.sep)


_FOLDER = _working_folder()
"""The working folder at the start: the program may change it later, and remove this one."""


@cache
def package_of(filename: str) -> str | None:
    """The package that a file belongs to; None for code outside all packages.

    "python" is the standard library, and "" is the emulator's own.
    """
    if not filename or filename.startswith("<"):
        return _PYTHON
    if is_generated(filename):
        return _TORCH
    path = os.path.realpath(_FOLDER / filename)
    if path.startswith(_OURS):  # first, because an installed tuner lies in a package folder
        return ""
    parts = Path(filename).parts
    for folder in _PACKAGES:
        if folder in parts:
            rest = parts[parts.index(folder) + 1 :]
            return rest[0].removesuffix(".py") if rest else _PYTHON
    if path.startswith(_STANDARD):
        return _PYTHON
    return _package_of_command(path)


def is_generated(filename: str) -> bool:
    """True if torch.compile generated the file."""
    return _INDUCTOR.search(filename) is not None


def _package_of_command(path: str) -> str | None:
    """The package whose installed command this script is; None for other scripts."""
    script = Path(path)
    if script.suffix:
        return None
    for entry in metadata.entry_points(group="console_scripts", name=script.name):
        if f"from {entry.module} import" in script.read_text(errors="replace"):
            return entry.module.partition(".")[0]
    return None


def package_that_runs() -> str | None:
    """The installed package whose command or module this process runs, as "trl" in `trl sft`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        name: str = spec.name
        package: str | None = name.partition(".")[0]
    else:
        package = package_of(getattr(main, "__file__", None) or "")
    return package if package not in {_PYTHON, _TORCH, ""} else None


def shown(filename: str, line: int) -> str:
    """A place in the code to show: its path below the folder that the program started in.

    For files elsewhere, as in packages, it is the last folder and the file.
    """
    cells = _cells(filename)
    for cell in reversed(cells):
        if cells[cell] < line:
            return shown(cell, line - cells[cell])
    if package_of(filename) is None:
        below = os.path.relpath(_FOLDER / filename, _FOLDER)
        if not below.startswith(os.pardir):
            return f"{below}:{line}"
    return f"{Path(*Path(filename).parts[-2:])}:{line}"


def places(frames: Iterable[tuple[str, int, str]]) -> tuple[str | None, str | None]:
    """The innermost line of the program's own code, and the innermost outside PyTorch.

    `frames` are (file, line, function), innermost first. If all code lies in packages, the
    program is the package whose command runs.
    """
    command = library = None
    runs = package_that_runs()
    for filename, line, _ in frames:
        package = package_of(filename)
        if package is None:
            own = shown(filename, line)
            return own, library or own
        if package == runs:
            command = command or shown(filename, line)
        if package not in {_PYTHON, _TORCH, ""}:
            library = library or shown(filename, line)
    return command, library


def program_line(frame: FrameType | None, *, frames: Any = None) -> str | None:
    """The program's own line in `frame` or its callers, or in the `frames` of a traceback."""
    if frames is not None:
        summary = [(f.filename, f.lineno or 0, f.name) for f in reversed(frames)]
        return places(summary)[0]
    return places(frames_of(frame))[0]


MOST_ROWS = 200
"""The most rows in the list; further ones are counted in the last."""
UNKNOWN = "unknown"
_PRINTS = f"torch{os.sep}_tensor_str.py"
"""PyTorch's own printing of tensors."""
SIZE, BRANCH = "size", "branch"
"""Uses of a value on the host: a size follows, or the program branches by it."""


class Unknowns:
    """Counts the uses of unknown values in this process, by operator, line and kind.

    A kind is "at most", "assumed" or "made up" (notes.py), or "unknown" for values without a note.
    """

    def __init__(self) -> None:
        self._rows: Counter[tuple[str, str | None, str, bool]] = Counter()
        self.floats_read = 0
        """Reads by the host of floats that were not computed; they decide no size, and no row."""

    def decided(self, operator: str, kind: str) -> None:
        """Count values that decided the size of the result of `operator`."""
        self._add(operator, kind, decides_shape=True)

    def read(self, operator: str, kind: str = UNKNOWN) -> None:
        """Count values that were read or lost in `operator`: they may decide anything."""
        self._add(operator, kind, decides_shape=False)

    @property
    def times(self) -> int:
        """The number of all uses, reads of floats included."""
        return self._rows.total() + self.floats_read

    def used(self, operator: str, kind: str, use: str, *, grows: bool) -> None:
        """Count a value that the host read, by its use there (`uses.Use`): a size or a branch."""
        if use == SIZE:
            bounded = grows and kind in ("at most", "assumed")
            self.decided(f"{operator}, a size follows", kind if bounded else "made up")
        elif use:
            self._add(operator, BRANCH, decides_shape=False)
        else:
            self.read(operator, kind)

    def rows(self) -> list[dict[str, Any]]:
        """The counts: operator, line (or None), kind, decides_shape, times; JSON types only."""
        names = ("operator", "line", "kind", "decides_shape")
        return [
            {**dict(zip(names, row, strict=True)), "times": times}
            for row, times in list(self._rows.items())  # other threads go on
        ]

    def _add(self, operator: str, kind: str, *, decides_shape: bool) -> None:
        frames = list(frames_of(sys._getframe(1)))
        if any(filename.endswith(_PRINTS) for filename, _, _ in frames):
            return  # the size of a text follows
        own, library = places(frames)
        row = (operator, own or library, kind, decides_shape)
        if row not in self._rows and len(self._rows) >= MOST_ROWS:
            row = ("(more operators than can be listed)", None, kind, decides_shape)
        self._rows[row] += 1


def calling_package() -> str | None:
    """The package that called into PyTorch; None for the program's own code."""
    for filename, _, _ in frames_of(sys._getframe(1)):
        package = package_of(filename)
        if package not in ("python", "torch", ""):
            return package
    return ""


def frames_of(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    """(file, line, function) of a frame and its callers, innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def called_around(frame: FrameType | None) -> set[str]:
    """The program's functions that run in `frame` and its callers, and those that these call there.

    A call counts with the whole statement: in `save(copies(model))` both names are found while the
    copies are made.
    """
    names: set[str] = set()
    for filename, line, function in frames_of(frame):
        if package_of(filename) is None:
            names |= {function, *_called_at(filename, line)}
    return names


@cache
def parsed(filename: str) -> ast.Module | None:
    """The code of a file of the program; None for statements without a file.

    The cells of a notebook are one file (`joined`), and a script may run with a changed text.
    """
    names = _cells(filename) or (str(_FOLDER / filename),)
    text = "".join(line for name in names for line in linecache.getlines(name))
    try:
        return ast.parse(text) if text else None
    except (ValueError, SyntaxError, RecursionError):
        return None


def joined(filename: str, line: int) -> tuple[str, int]:
    """A place in a file; for a cell of a notebook, its place in all cells one after the other."""
    notebook = _CELL.sub("", filename)
    return notebook, line + _cells(notebook).get(filename, 0)


_CELL = re.compile(r"(?<=\.ipynb)\[\d+\]$")


@cache
def _cells(notebook: str) -> dict[str, int]:
    """The cells of a notebook that runs, each with the number of lines before it."""
    found, count = {}, 0
    for name in list(linecache.cache) if notebook.endswith(".ipynb") else ():
        if _CELL.sub("", name) == notebook:
            found[name] = count
            count += len(linecache.getlines(name))
    return found


def is_file(filename: str, path: str) -> bool:
    """True if `path` is the file of some code: the program's own may be relative."""
    return os.path.realpath(_FOLDER / filename) == os.path.realpath(_FOLDER / path)


def _called_at(filename: str, line: int) -> Iterator[str]:
    tree = parsed(filename)
    if tree is None:
        return
    for one in ast.walk(tree):
        if not isinstance(one, ast.stmt) or hasattr(one, "body"):
            continue
        if one.lineno <= line <= (one.end_lineno or 0):
            yield from called_in(one)


def in_a_forward() -> bool:
    """True while a module is being called: some modules create or move their parts there."""
    import torch

    call = torch.nn.Module._call_impl.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not call:
        frame = frame.f_back
    return frame is not None
