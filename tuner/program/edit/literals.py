"""Every literal of a program that may hold a setting, with the names beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import NamedTuple

from tuner.program.edit.place import Location, in_words
from tuner.program.edit.python_file import PythonText
from tuner.program.edit.source import READERS, SourceFile

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_STEM = 4
"""The letters in which words are alike: "packed" and "packing"."""
_OTHER_DATA = frozenset(("eval", "evaluation", "val", "valid", "validation", "dev", "test"))


def literals_of(source: SourceFile) -> list[Location]:
    """The literals of a script, a notebook, a settings file, or a text of words (TOML, shell)."""
    if source.path.suffix.lower() not in READERS:
        return list(in_words(source.data.decode("utf-8")))
    plain = [place for place in source.places if place.problem is None]
    return list({(place.start, place.end): place for place in reversed(plain)}.values())[::-1]


def plain(name: str) -> str:
    """`max_length` of `--max-length`."""
    return name.lstrip("-+").replace("-", "_").lower()


def rank(names: Sequence[str], wanted: Sequence[str]) -> int:
    """The distance of a literal with `names` from a setting that is called one of `wanted`."""
    own = [plain(name) for name in names[:4]]
    if own[:1] and own[0] in wanted:
        return 0
    if any(name in wanted for name in own):
        return 1
    words = {word[:_STEM] for name in wanted for word in name.split("_") if len(word) > 1}
    words -= {"max", "use"}
    near = [{w.lower() for w in _WORDS.findall(name)} for name in names[:4]]
    if any(part & _OTHER_DATA and "train" not in part for part in near[:2]):
        return 4
    return 2 if any(word[:_STEM] in words for part in near for word in part) else 3


class Call(NamedTuple):
    """The characters of the last argument of a call; none stand where it gets its first one."""

    start: int
    end: int


def call_at(source: SourceFile, line: int, column: int) -> Call | None:
    """The call at a place of the text that Python compiles, for a notebook of all its cells."""
    code = source.python
    reader = PythonText(code.text)
    for node in ast.walk(reader.tree):
        if isinstance(node, ast.Call) and (node.lineno, node.col_offset) == (line, column):
            parts = [reader.span(part) for part in (*node.args, *node.keywords)]
            closing = reader.span(node)[1] - 1
            return Call(*(code.starts[one] for one in max(parts, default=(closing, closing))))
    return None
