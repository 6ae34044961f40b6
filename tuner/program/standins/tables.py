"""Classes and functions of libraries, each with what it has of its bases once it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Tables:
    """Facts of a class ("trl.SFTConfig"), made of rows of `sources.Reader`, which `row` finds.

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
            kind, _, method = name.rpartition(".")
            if (row := self.row(name)) is not None:
                self._made[name] = self._whole(row)
            else:
                its = self.get(kind) if "." in kind else None
                found = (self.get(f"{base}.{method}") for base in (its["bases"] if its else ()))
                self._made[name] = next(filter(None, found), None)
        return self._made[name]

    def _whole(self, row: Mapping[str, Any]) -> dict[str, Any]:
        nothing: dict[str, Any] = {"fields": {}, "contrary": {}, "also": "", "bases": []}
        above = {base: self.get(base) or nothing for base in row.get("bases", ())}
        fields = {
            # A type alone has None as its default.
            name: dict(zip(("type", "default"), [each, None] if isinstance(each, str) else each))
            for name, each in row.get("fields", {}).items()
        }
        own = nothing | {key: row[key] for key in ("contrary", "also", "open") if key in row}
        own["fields"] = fields
        lines = [own] if "call" in row else [*reversed(above.values()), own]
        made: dict[str, Any] = {"open": False} | {
            key: value for each in lines for key, value in each.items()
        }
        for key in ("fields", "contrary"):
            made[key] = {name: value for each in lines for name, value in each[key].items()}
        made["also"] = " ".join(each["also"] for each in lines)
        bases = [name for base, its in above.items() for name in (base, *its["bases"])]
        made["bases"] = list(dict.fromkeys(bases))
        if "call" in row:
            made["parameters"] = list(fields)[: len(fields) - row["call"]]
        return made
