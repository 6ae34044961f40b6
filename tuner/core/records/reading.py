"""Reads records from JSON as the types that their fields declare.

People can edit a journal. Types such as `Bytes` limit each quantity, so that an impossible number
is refused at its line instead of failing, or being recommended, far from it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from tuner.core.errors import Problem
from tuner.core.records.configuration import Configuration, KnobValue

Record = TypeVar("Record")

Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
"""A size of memory: an exbibyte is more than any machine has."""

Count = Annotated[int, Meta(ge=0, le=1 << 60)]

Number = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""No quantity of a training run comes near the ends: an exaFLOP/s for a century is 3e27."""

Quantity = Annotated[float, Meta(ge=0, le=1e30)]
"""A `Number` that is never negative: a time, a rate, a share."""

Ends = tuple[Number, Number]
"""The lower and upper end of an interval."""


def read(cls: type[Record], data: Any) -> Record:
    """The record of type `cls` in JSON types; names that it does not have are ignored.

    Parts may be records already. Raises ValueError with the first field that is missing or not
    of its type.
    """
    try:
        return msgspec.convert(data, cls, dec_hook=_custom)
    except msgspec.ValidationError as error:
        text, path = _in_words(str(error))
        raise ValueError(f"field {path.removeprefix('.')}: {text}" if path else text) from error


def faults(cls: type[Any], data: Mapping[str, Any]) -> list[Problem]:
    """Each field of a record in JSON types that is missing, not of its type, or not known."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    types = get_type_hints(cls, include_extras=True)
    found = [Problem("is not a known key", str(name)[:60]) for name in data if name not in known]
    for name, its in known.items():
        if name in data:
            try:
                msgspec.convert(data[name], types[name], dec_hook=_custom)
            except msgspec.ValidationError as error:
                text, inside = _in_words(str(error))
                found.append(Problem(text, name + inside))
            except UnicodeEncodeError:  # of a text in the place of a number
                found.append(Problem("holds half of a surrogate pair, which is no character", name))
        elif its.default is its.default_factory is dataclasses.MISSING:
            found.append(Problem("is missing", name))
    return found


def written(record: Any) -> dict[str, Any]:
    """The fields of a record as JSON types, nested where they are."""
    # By way of JSON, which has lists for tuples; YAML would write those as Python's.
    fields: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(record, enc_hook=dict)))
    return fields


def _custom(cls: type[Any], value: Any) -> Any:
    if cls is not Configuration:
        raise NotImplementedError(cls)
    try:
        return Configuration(msgspec.convert(value, dict[str, KnobValue]))
    except msgspec.ValidationError as error:
        raise ValueError(_in_words(str(error))[0]) from error  # msgspec says where it stands


def _in_words(text: str) -> tuple[str, str]:
    """The text of an error of msgspec, and the path to the value: ".memory.device_bytes"."""
    said, _, path = text.partition(" - at `$")
    return said[0].lower() + said[1:].replace("`", ""), path.removesuffix("`")
