"""A new setting beside one that is there, in the style of its file."""

from __future__ import annotations

import json
import re

from tuner.core.expressions import show
from tuner.core.records import KnobValue
from tuner.program.edit.place import Location
from tuner.program.edit.source import PYTHON, SourceFile, TextEdit

_KEY = re.compile(
    r"""(?P<indent>\s*(-\s+)?)(?P<quote>["']?)[\w.-]+(?P=quote)(?P<sign>\s*[:=]\s*)"""
)


def can_hold(source: SourceFile, literal: Location) -> bool:
    """True if another setting can stand beside `literal`: in its call, dictionary or mapping."""
    if source.path.suffix in PYTHON:
        return literal.item is not None
    return bool(literal.names)


def beside(source: SourceFile, literal: Location, name: str, value: KnobValue) -> list[TextEdit]:
    """The edits behind `literal` that set `name` too."""
    text, place = source.data.decode("utf-8"), literal
    if source.path.suffix in PYTHON:
        assert literal.item is not None
        kind, start = literal.item
        before = text[start : place.start]
        equals = re.search(r"\s*=\s*$", before)
        sign = equals[0] if equals and not bool(place.cell) else "="
        shown = json.dumps(value) if isinstance(value, str) else str(value)
        item = f'"{name}": {shown}' if kind == "entry" else f"{name}{sign}{shown}"
        return behind(text, start, place.end, item, in_json=bool(place.cell))
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


def behind(text: str, start: int, end: int, item: str, *, in_json: bool = False) -> list[TextEdit]:
    """The edits behind the argument of Python at `start` to `end` that add one more."""
    first = text.rfind("\n", 0, start) + 1
    last, newline = _line_end(text, end)
    rest = re.fullmatch(r"(\s*,)?\s*(#.*)?", text[end:last])
    if in_json or text[first:start].strip() or rest is None:
        added = f", {item}"
        return [
            TextEdit(end, end, json.dumps(added, ensure_ascii=False)[1:-1] if in_json else added)
        ]
    comma = [] if rest[1] else [TextEdit(end, end, ",")]
    return [*comma, TextEdit(last, last, f"{newline}{text[first:start]}{item},")]


def _line_end(text: str, place: int) -> tuple[int, str]:
    """The end of the line, and what ends it."""
    end = text.find("\n", place)
    end = len(text) if end < 0 else end
    return (end - 1, "\r\n") if text[end - 1 : end] == "\r" else (end, "\n")
