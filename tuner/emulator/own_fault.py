"""A fault of tuner's own code inside an emulated program, as the program's processes told it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OwnFault:
    """The program went on without what tuner was reading there.

    `type` and `message` are those of the exception, `line` is in tuner's own code.
    """

    type: str
    message: str
    line: str | None
    reading: str

    def __str__(self) -> str:
        where = f" at tuner's {self.line}" if self.line else ""
        return f"tuner itself failed{where}, reading {self.reading}: {self.type}: {self.message}"


def own_fault(events: Iterable[Mapping[str, Any]]) -> OwnFault | None:
    """The first fault among the events of a session; None where there was none."""
    names = [field.name for field in dataclasses.fields(OwnFault)]
    faults = (event for event in events if event["event"] == "fault")
    return next((OwnFault(**{name: one[name] for name in names}) for one in faults), None)
