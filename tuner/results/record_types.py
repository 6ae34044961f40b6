"""Whether the values of a record are of the types that its fields declare.

A journal is a file that people can edit, and JSON knows no types of ours.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tuner.records import StageNumbers
from tuner.records.measurement import RankMemory

MAX_MAGNITUDE = 1e30
"""No quantity of a training run comes near it (an exaFLOP for a century is 3e27), and beyond a
float's range a number cannot be shown."""


def wrong_types(record: Any, prefix: str = "") -> str:
    """The first field whose value is not of its declared type, or an empty string.

    Sorting and formatting would otherwise fail far from the line that is wrong.
    """
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        check = _TYPE_CHECKS.get(str(field.type))
        if dataclasses.is_dataclass(value):
            wrong = wrong_types(value, f"{prefix}{field.name}.")
            if wrong:
                return wrong
        elif check is not None and not check(value):
            return f"field {prefix}{field.name} is {value!r:.40}, expected {field.type}"
    return ""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_MAGNITUDE


def _is_number(value: object) -> bool:
    # False of nan, too.
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= MAX_MAGNITUDE
    )


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value))


def _is_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_str, value))


def _is_knob_value(value: object) -> bool:
    if isinstance(value, int | float):
        return abs(value) <= sys.float_info.max
    return isinstance(value, str) or _is_texts(value)


def _is_stage(value: object) -> bool:
    return isinstance(value, StageNumbers) and not wrong_types(value)


def _are_ranks(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(rank, RankMemory) and not wrong_types(rank) for rank in value
    )


def _mapping_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    def is_mapping(value: object) -> bool:
        return isinstance(value, Mapping) and all(map(check, value.values()))

    return is_mapping


_TYPE_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": _is_int,
    "int | None": lambda value: value is None or _is_int(value),
    "float": _is_number,
    "float | None": lambda value: value is None or _is_number(value),
    "str": _is_str,
    "str | None": lambda value: value is None or _is_str(value),
    "Mapping[str, int]": _mapping_of(_is_int),
    "Mapping[str, float]": _mapping_of(_is_number),
    "Mapping[str, str]": _mapping_of(_is_str),
    "Mapping[str, tuple[float, float]]": _mapping_of(_is_pair),
    "Mapping[str, StageNumbers]": _mapping_of(_is_stage),
    "tuple[float, float] | None": lambda value: value is None or _is_pair(value),
    "tuple[str, ...]": _is_texts,
    "tuple[RankMemory, ...]": _are_ranks,
    "Configuration": _mapping_of(_is_knob_value),
}
