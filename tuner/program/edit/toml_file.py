"""The values of a TOML file that stand in one line, each with its exact place in the text.

tomllib gives no places, so lines such as `key = value` are candidates, confirmed by the value that
tomllib has for their path.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from tuner.core.errors import InputError
from tuner.program.edit.place import Location, Value, read_number
from tuner.space.apply import Path

_KEY_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\\\n]*"|'[^'\n]*')"""
_KEY = rf"{_KEY_PART}(?:[ \t]*\.[ \t]*{_KEY_PART})*"
_HEADER = re.compile(rf"[ \t]*(\[\[?)[ \t]*({_KEY})[ \t]*\]\]?[ \t]*(?:#.*)?")
_VALUE = r""""(?:[^"\\]|\\.)*"|'[^']*'|\[[^\[\]#]*\]|[^\s#"'\[{][^\s#]*"""
_ENTRY = re.compile(rf"[ \t]*({_KEY})[ \t]*=[ \t]*({_VALUE})[ \t]*(?:#.*)?")
_LINE = re.compile(r"([^\n]*?)\r?(?:\n|\Z)")


def read_toml(text: str, file: str) -> list[Location]:
    """All values of the TOML document `text`; those without a known place come last."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{file}: broken TOML: {error}") from None
    places = [place for place in _candidates(text) if _is_real(place, data)]
    placed = {place.path for place in places}
    rest = [_unplaced(path) for path in _paths(data, ()) if path not in placed]
    return places + rest


def _candidates(text: str) -> Iterator[Location]:
    table: Path = ()
    counts: dict[Path, int] = {}
    for number, line in enumerate(_LINE.finditer(text), start=1):
        if header := _HEADER.fullmatch(line[1]):
            table = _table(_steps(header[2]), header[1] == "[[", counts)
        elif entry := _ENTRY.fullmatch(line[1]):
            start = line.start() + entry.start(2)
            yield _place((*table, *_steps(entry[1])), number, start, entry[2])


def _table(steps: Path, is_array: bool, counts: dict[Path, int]) -> Path:
    """The path of a header: below a list of tables it means the last one that was begun."""
    path: Path = ()
    for position, step in enumerate(steps):
        path = (*path, step)
        if is_array and position == len(steps) - 1:
            counts[path] = counts.get(path, 0) + 1
        if path in counts:
            path = (*path, counts[path] - 1)
    return path


def _steps(key: str) -> Path:
    return tuple(part.strip("\"'") for part in re.findall(_KEY_PART, key))


def _place(path: Path, line: int, start: int, raw: str) -> Location:
    value, problem = _value(raw)
    return Location(
        path=path,
        line=line,
        start=start,
        end=start + len(raw),
        raw=raw,
        language="toml",
        value=value,
        quote="'" if "'" in raw and '"' not in raw else '"',
        problem=problem,
        kind="list" if raw.startswith("[") else "value",
    )


def _parsed(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return None


def _value(raw: str) -> tuple[Value, str | None]:
    parsed = _parsed(raw)
    if isinstance(parsed, bool | str):
        return parsed, None
    if isinstance(parsed, int | float):
        number = read_number(raw)
        return (math.nan if number is None else number), None
    if isinstance(parsed, list) and all(isinstance(item, str) for item in parsed):
        return tuple(parsed), None
    return None, f"is {raw[:40]}, which is not the value of a parameter"


def _is_real(place: Location, data: Any) -> bool:
    for step in place.path:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return False
    parsed = _parsed(place.raw)
    return type(parsed) is type(data) and repr(parsed) == repr(data)


def _paths(data: Any, path: Path) -> Iterator[Path]:
    if path:
        yield path
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _paths(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _paths(value, (*path, index))


def _unplaced(path: Path) -> Location:
    problem = "is a table, or written in a way that cannot be changed here"
    return Location(path=path, line=0, start=0, end=0, raw="", language="toml", problem=problem)
