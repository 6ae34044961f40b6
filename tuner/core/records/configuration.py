"""One setting of every knob: the value that trials and results are about."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from typing import Any, TypeVar, overload

_encode = json.JSONEncoder(separators=(",", ":")).encode


def _shared(value: Any) -> Any:
    """`value` as it is kept; words are the same objects in all configurations."""
    if type(value) is str:
        return sys.intern(value)
    return tuple(map(_shared, value)) if isinstance(value, list | tuple) else value


KnobValue = bool | int | float | str | tuple[str, ...]


Default = TypeVar("Default")


class Configuration(Mapping[str, KnobValue]):
    """One complete setting of every knob, fixed and derived value: an immutable mapping.

    Lists become tuples, so that a configuration can be hashed. Equality and `key` do not
    depend on the order of the names.
    """

    __slots__ = ("_key", "_values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values: dict[str, KnobValue] = {
            name: _shared(value) for name, value in sorted(values.items())
        }
        self._key = hashlib.sha256(_encode(self._values).encode()).hexdigest()[:16]

    @property
    def key(self) -> str:
        """16 hexadecimal digits that identify these values, the same in every process."""
        return self._key

    def replace(self, **changes: Any) -> Configuration:
        """A copy with some values changed or added."""
        return Configuration({**self._values, **changes})

    def values_of(self, names: Iterable[str]) -> tuple[KnobValue | None, ...]:
        """The values of these names, None for one that is not there."""
        return tuple(map(self._values.get, names))

    def to_dict(self) -> dict[str, Any]:
        """The values as JSON types (tuples become lists)."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self._values.items()}

    # Mapping's own go through `__getitem__` for each name, which a search of thousands feels.
    @overload
    def get(self, name: str, /) -> KnobValue | None: ...
    @overload
    def get(self, name: str, /, default: KnobValue | Default) -> KnobValue | Default: ...
    def get(self, name: str, /, default: Any = None) -> Any:
        """The value of a name, or `default`."""
        return self._values.get(name, default)

    def items(self) -> ItemsView[str, KnobValue]:
        """The names with their values."""
        return self._values.items()

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> KnobValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Configuration) and self._key == other._key

    def __repr__(self) -> str:
        return f"Configuration({self._values!r})"
