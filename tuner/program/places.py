"""The places of a record, for people: "train.py:12 max_length", "cell 4, line 7"."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.core.expressions import syntax
from tuner.program.arguments import COMMAND_LINE, options_of
from tuner.program.edit.notebook import code_cells
from tuner.program.edit.python_file import last_name
from tuner.program.edit.source import NOTEBOOK, PYTHON
from tuner.program.program import Program

Row = Mapping[str, Any]
"""A part of a record: a training, an object or a place (`tuner.program.standins`)."""

_CELL = ": cell "


@dataclass(slots=True)
class Places:
    """Names the places of one program's record."""

    program: Program
    _trees: dict[str, ast.AST | None] = field(default_factory=dict)

    def at(self, where: Row | None) -> str:
        """For people: "train.py:12", or "cell 4, line 7"."""
        return self._named(where["file"], where["line"]) if where else self.program.main

    def _named(self, file: str, line: int) -> str:
        if _CELL in file:
            return f"cell {file.rpartition(_CELL)[2]}, line {line}"
        sources = {os.path.realpath(source.path): source.path for source in self.program.sources}
        main = self.program.files[self.program.main].path
        near = Path(os.path.normpath(main.parent / os.path.relpath(file, main.resolve().parent)))
        return f"{sources.get(os.path.realpath(file), near)}:{line}"

    def line(self, where: Row | None) -> str:
        """The text of a line; empty if the place is unknown."""
        lines = self._text(where["file"]).splitlines() if where else []
        return lines[where["line"] - 1] if where and where["line"] <= len(lines) else ""

    def of_argument(self, name: str, made: Row, call: ast.Call | None) -> str:
        """The keyword of a call; the word, or the key of a file, with which a parser fills it."""
        where = made.get("where")
        keywords = {one.arg: one.lineno for one in call.keywords} if call is not None else {}
        if where and name in keywords:
            return self._named(where["file"], keywords[name])
        is_made = call is not None and last_name(call.func) == made["class"].rpartition(".")[2]
        if is_made and None not in keywords:
            return self.at(where)  # without its name
        if name in options_of(self.program.command):
            return COMMAND_LINE
        for source in self.program.sources:
            if source.path.suffix not in PYTHON:
                for place in source.places:
                    if place.path and place.path[-1] == name:
                        return place.where(source.path)
        return self.at(where)

    def call(self, where: Row | None) -> ast.Call | None:
        """The call that ends at this place."""
        if where is None:
            return None
        if (file := where["file"]) not in self._trees:
            self._trees[file] = None
            with contextlib.suppress(SyntaxError, ValueError, OSError):
                self._trees[file] = syntax(self._text(file))
        tree, end = self._trees[file], (where["end"], where["end_column"])
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call)) if tree else ()
        return next((n for n in calls if (n.end_lineno, n.end_col_offset) == end), None)

    def _text(self, file: str) -> str:
        main = self.program.files[self.program.main]
        if _CELL in file and main.path.suffix == NOTEBOOK:
            cells = code_cells(main.data.decode(), str(main.path))
            number = int(file.rpartition(_CELL)[2])
            return next((cell.text for cell in cells if cell.number == number), "")
        for source in self.program.sources:
            if os.path.realpath(source.path) == os.path.realpath(file):
                return source.data.decode("utf-8-sig")
        return Path(file).read_text(encoding="utf-8-sig")


def last(path: str) -> str:
    """The name of a class without its modules."""
    return path.rpartition(".")[2]


def made(value: Any) -> Row | None:
    """The object that a value of a record is; None for another value."""
    one = value.get("$object", value) if isinstance(value, Mapping) else None
    return one if one and "class" in one else None
