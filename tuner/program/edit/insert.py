"""A new setting: beside one that is there, in the style of its file, or in a call."""

from __future__ import annotations

import json
import re

from tuner.core.expressions import show
from tuner.core.records import KnobValue
from tuner.program.edit.literals import Call
from tuner.program.edit.place import Location
from tuner.program.edit.source import NOTEBOOK, SourceFile, TextEdit

_KEY = re.compile(
    r"""(?P<indent>\s*(-\s+)?)(?P<quote>["']?)[\w.-]+(?P=quote)(?P<sign>\s*[:=]\s*)"""
)


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


def in_call(source: SourceFile, call: Call, name: str, value: KnobValue) -> list[TextEdit]:
    """The edits that give a call of Python the argument `name`, behind those that it has."""
    text, start, end = source.data.decode("utf-8"), call.start, call.end
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
