"""The literals of a program that may hold a setting, and the text of a setting beside them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence

from tuner.core.expressions import show
from tuner.core.records import KnobValue
from tuner.program.edit.place import Location, in_words
from tuner.program.edit.python_file import PythonText
from tuner.program.edit.source import NOTEBOOK, READERS, SourceFile, TextEdit

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_KEY = re.compile(
    r"""(?P<indent>\s*(-\s+)?)(?P<quote>["']?)[\w.-]+(?P=quote)(?P<sign>\s*[:=]\s*)"""
)
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


def call_at(source: SourceFile, line: int, column: int) -> tuple[int, int] | None:
    """The characters of the last argument of a call; none stand where it gets its first one.

    The place is one of the text that Python compiles, for a notebook of all its cells.
    """
    code = source.python
    reader = PythonText(code.text)
    for node in ast.walk(reader.tree):
        if isinstance(node, ast.Call) and (node.lineno, node.col_offset) == (line, column):
            parts = [reader.span(part) for part in (*node.args, *node.keywords)]
            closing = reader.span(node)[1] - 1
            start, end = max(parts, default=(closing, closing))
            return code.starts[start], code.starts[end]
    return None


def beside(source: SourceFile, literal: Location, name: str, value: KnobValue) -> list[TextEdit]:
    """The edits behind `literal` of a settings file that set `name` too."""
    text, place = source.data.decode("utf-8"), literal
    start = text.rfind("\n", 0, place.start) + 1
    end, newline = _line_end(text, place.end)
    key = _KEY.fullmatch(text, start, place.start)
    indent = key["indent"].replace("-", " ") if key else ""
    literal_text = show(value) if not isinstance(value, str) else json.dumps(value)
    if source.path.suffix == ".json":
        # The line of a value that stands alone is followed by one more.
        gap = f"{newline}{indent}" if key else " "
        return [TextEdit(place.end, place.end, f',{gap}"{name}": {literal_text}')]
    is_toml = source.path.suffix == ".toml"
    item = f"{name} = {literal_text}" if is_toml else f"{name}: {show(value)}"
    if key and re.fullmatch(r"[\"']?\s*(#.*)?", text[place.end : end]):
        return [TextEdit(end, end, f"{newline}{indent}{item}")]
    return [TextEdit(place.end, place.end, f", {item}")]


def in_call(
    source: SourceFile, after: tuple[int, int], name: str, value: KnobValue
) -> list[TextEdit]:
    """The edits that give a call of Python the argument `name`, behind its last one, `after`."""
    text, (start, end) = source.data.decode("utf-8"), after
    in_json = source.path.suffix == NOTEBOOK
    style = None if in_json else re.match(r"\w+([ \t]*=(?!=)[ \t]*)", text[start:end])
    shown = json.dumps(value) if isinstance(value, str) else str(value)
    item = f"{name}{style[1] if style else '='}{shown}"
    if start == end:
        return [TextEdit(end, end, json.dumps(item)[1:-1] if in_json else item)]
    first = text.rfind("\n", 0, start) + 1
    last, newline = _line_end(text, end)
    rest = re.fullmatch(r"(\s*,)?\s*(#.*)?", text[end:last])
    if in_json or text[first:start].strip() or rest is None:
        added = json.dumps(item, ensure_ascii=False)[1:-1] if in_json else item
        return [TextEdit(end, end, f", {added}")]
    comma = [] if rest[1] else [TextEdit(end, end, ",")]
    return [*comma, TextEdit(last, last, f"{newline}{text[first:start]}{item},")]


def _line_end(text: str, place: int) -> tuple[int, str]:
    """The end of the line, and what ends it."""
    end = text.find("\n", place)
    end = len(text) if end < 0 else end
    return (end - 1, "\r\n") if text[end - 1 : end] == "\r" else (end, "\n")
