"""Starts a program with the changes that were made to its files, which stay as they are.

A changed script is compiled from a copy under the script's own name: its folder, its arguments and
the lines of its errors are those of the original. Of a file of settings the command gets a copy.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from tuner.apply.notebook import code_cells
from tuner.apply.source import SourceFile
from tuner.program.program import NOTEBOOK, Program, file_in

_START = """\
import sys as _sys
_sys.argv[0], _sys.path[0] = {name!r}, {folder!r}
__file__ = {path!r}
with open({copy!r}, encoding="utf-8") as _file:
    _parts = __import__("json").load(_file)
for _name, _text in _parts:
    exec(compile(_text, _name, "exec", dont_inherit=True))
"""
"""What Python is given in place of a script."""


_NOTEBOOK = "def get_ipython():\n    return None\ndisplay = print\n"
"""What Jupyter adds to the names of a notebook, as far as a program can do with it."""

PREFIX = "tuner-program-"
"""Of the folders with copies; the id of the process that made it follows."""


@contextlib.contextmanager
def runnable(program: Program, original: Program | None = None) -> Iterator[list[str]]:
    """The command that starts `program`; files that differ from those of `original` are copied.

    The copies are gone when the block ends.
    """
    clear_left()
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as folder:
        copied = {
            word: _copy(source, word, Path(folder, str(number)))
            for number, (word, source) in enumerate(program.files.items())
            if source.path.suffix == NOTEBOOK
            or (original is not None and source.data != original.files[word].data)
        }
        yield [_with_copy(word, copied) for word in program.command]


def _with_copy(word: str, copied: Mapping[str, str]) -> str:
    named = file_in(word)
    if named not in copied:
        return word
    return word.removesuffix(named) + copied[named]


def clear_left() -> None:
    """Remove the copies of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)  # somebody else's cannot be removed


def _copy(source: SourceFile, word: str, folder: Path) -> str:
    folder.mkdir()
    if source.path.suffix not in (".py", NOTEBOOK):
        copy = folder / source.path.name
        copy.write_bytes(source.data)
        return str(copy)
    parts = folder / "parts.json"
    parts.write_text(json.dumps(_parts(source, word)), encoding="utf-8")
    start = folder / f"{source.path.stem}.py"
    path = source.path.resolve()
    start.write_text(
        _START.format(name=word, folder=str(path.parent), path=str(path), copy=str(parts)),
        encoding="utf-8",
    )
    return str(start)


def _parts(source: SourceFile, word: str) -> list[tuple[str, str]]:
    """(file name, text) of what is run, one after the other: the script, or each code cell."""
    text = source.data.decode("utf-8-sig")
    path = str(source.path.resolve())
    if source.path.suffix != NOTEBOOK:
        return [(path, text)]
    cells = [(f"{path}[{cell.number}]", cell.text) for cell in code_cells(text, word)]
    return [("<notebook>", _NOTEBOOK), *cells]
