"""Classes and functions of libraries, each with what it has of its bases once it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Tables:
    """What is known of "trl.SFTConfig", made of rows of `sources.Reader`, which `row` finds.

    "fields" have a "default", unless they have to be given, and a "type"; "parameters" are the
    positional ones of what is no dataclass; "bases" are all of them; "open" ones take other names;
    "also" are names without a default; "contrary" are switches that are the contrary of another
    where they are None (bf16 of fp16).
    """

    def __init__(self, row: Callable[[str], Mapping[str, Any] | None]) -> None:
        self.row = row
        self._made: dict[str, dict[str, Any] | None] = {}

    def __contains__(self, name: str) -> bool:
        return self.row(name) is not None

    def get(self, name: str) -> dict[str, Any] | None:
        """A class or function, or a method that a class has of its bases; None if unknown."""
        if name not in self._made:
            row = self.row(name)
            self._made[name] = self._inherited(name) if row is None else self._whole(row)
        return self._made[name]

    def _inherited(self, name: str) -> dict[str, Any] | None:
        kind, _, method = name.rpartition(".")
        its = self.get(kind) if "." in kind else None
        found = (self.get(f"{base}.{method}") for base in (its["bases"] if its else ()))
        return next((each for each in found if each), None)

    def _whole(self, row: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {
            "fields": {},
            "contrary": {},
            "bases": [],
            "also": "",
            "open": False,
        }
        for base in reversed(row.get("bases", ())):
            its = self.get(base)
            made["bases"] = [base, *(its["bases"] if its else ()), *made["bases"]]
            if its and "call" not in row:
                for key in ("fields", "contrary"):
                    made[key] |= its[key]
                made["also"] += f" {its['also']}"
                made |= {key: its[key] for key in ("open", "parameters") if key in its}
        fields = {name: _field(value) for name, value in row.get("fields", {}).items()}
        made["fields"] |= fields
        made["contrary"] |= row.get("contrary", {})
        made["also"] += f" {row.get('also', '')}"
        made["open"] = row.get("open", made["open"])
        made["bases"] = list(dict.fromkeys(made["bases"]))
        if "call" in row:
            made["parameters"] = list(fields)[: len(fields) - row["call"]]
        return made


def _field(value: Any) -> dict[str, Any]:
    """A field of a row: a type alone has None as its default."""
    if isinstance(value, str):
        return {"default": None, "type": value}
    return {"type": value[0]} if len(value) == 1 else {"default": value[1], "type": value[0]}
