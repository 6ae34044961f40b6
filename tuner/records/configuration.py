"""One setting of every knob: the value that trials and results are about."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

KnobValue = bool | int | float | str | tuple[str, ...]


class Configuration(Mapping[str, KnobValue]):
    """One complete setting of every knob, fixed and derived value: an immutable mapping.

    Lists become tuples, so that a configuration can be hashed. Equality and `key` do not
    depend on the order of the names.
    """

    __slots__ = ("_key", "_values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values: dict[str, KnobValue] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in sorted(values.items())
        }
        text = json.dumps(self._values, sort_keys=True, separators=(",", ":"))
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def key(self) -> str:
        """16 hexadecimal digits that identify these values, the same in every process."""
        return self._key

    def replace(self, **changes: Any) -> Configuration:
        """A copy with some values changed or added."""
        return Configuration({**self._values, **changes})

    def to_dict(self) -> dict[str, Any]:
        """The values as JSON types (tuples become lists)."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self._values.items()}

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
