"""Dataclasses of arrays as named arrays without objects, for files that cannot run code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, TypeVar, get_type_hints, runtime_checkable

import numpy as np

_Value = TypeVar("_Value")


@runtime_checkable
class _Consistent(Protocol):
    """Arrays that belong together."""

    def require_consistent(self) -> None:
        """Raise ValueError unless they do."""


def to_arrays(value: Any) -> dict[str, Any]:
    """The arrays of a dataclass, with dots between the names of nested fields."""
    return dict(_arrays_of(value, ""))


def from_arrays(cls: type[_Value], arrays: Mapping[str, Any], name: str = "") -> _Value:
    """The inverse of `to_arrays`. Raises KeyError or ValueError when the arrays do not fit.

    A class may have `require_consistent`, which raises ValueError too.
    """
    found: dict[str, Any] = {}
    declared = get_type_hints(cls)
    for part in fields(cls):  # type: ignore[arg-type]
        inner, kind = f"{name}.{part.name}" if name else part.name, declared[part.name]
        if is_dataclass(kind):
            found[part.name] = from_arrays(kind, arrays, inner)  # type: ignore[arg-type]
            continue
        array, is_text = arrays[inner], kind == tuple[str, ...]
        if array.dtype.kind not in ("U" if is_text else "bif"):
            raise ValueError(f"{inner} holds {array.dtype}")
        kinds: dict[Any, Callable[[Any], Any]] = {int: int, float: float}
        found[part.name] = tuple(map(str, array)) if is_text else kinds.get(kind, np.asarray)(array)
    made = cls(**found)
    if isinstance(made, _Consistent):
        made.require_consistent()
    return made


def _arrays_of(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if is_dataclass(value):
        for part in fields(value):
            inner = f"{name}.{part.name}" if name else part.name
            yield from _arrays_of(getattr(value, part.name), inner)
    elif isinstance(value, tuple):
        yield name, np.array(value, dtype=np.str_)
    else:
        yield name, np.asarray(value)
