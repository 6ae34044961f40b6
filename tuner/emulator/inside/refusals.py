"""The requests that PyTorch gave up, and those of them that the program met later with less."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tuner.emulator.here import device_core
from tuner.emulator.inside.lines import frames_of, package_of

Entry = Mapping[str, Any]
"""An entry of the allocator's history, with its "frames"."""


class Refusals:
    """The refused requests of this process, in their order.

    `place_of` names the library's and the program's line of an entry.
    """

    def __init__(self, place_of: Callable[[Any], tuple[str, str]]) -> None:
        self._place_of = place_of
        self._refused: list[dict[str, Any]] = []

    def note(self, size: int) -> dict[str, Any]:
        """Note a request that is being refused; returns its number, line and thread."""
        device_core().emu_give_up_attempt()
        names = ("filename", "line", "name")
        frames = [dict(zip(names, one, strict=True)) for one in frames_of(sys._getframe(2))]
        entry = {"size": size, "time_us": time.time_ns() // 1000, "frames": frames}
        self._refused.append(entry)
        thread = threading.current_thread()
        return {
            "number": len(self._refused) - 1,
            "line": self._place_of(entry)[1] or None,
            "thread": "" if thread is threading.main_thread() else thread.name,
        }

    @property
    def times_us(self) -> list[int]:
        """The times of the refusals."""
        return [one["time_us"] for one in self._refused]

    def recovered(self, histories: Iterable[Iterable[Entry]]) -> list[int]:
        """The numbers of the requests whose line got as much or less later.

        So a search for the batch size goes on. Another line, as of a fallback to something else,
        does not tell that what was refused is not needed, nor does another caller: an evaluation
        and the training share the lines of their model.
        """
        made = [e for history in histories for e in history if e["action"] == "alloc"]
        return [n for n, one in enumerate(self._refused) if self._is_met(one, made)]

    def _is_met(self, refused: Entry, made: Iterable[Entry]) -> bool:
        place, functions = self._place_of(refused), _functions(refused)
        innermost = _own(refused)[:1]
        for entry in made:
            if entry["time_us"] <= refused["time_us"] or entry["size"] > refused["size"]:
                continue
            if innermost and innermost != _own(entry)[:1]:
                continue
            if self._place_of(entry) == place and _functions(entry) <= functions:
                return True
        return False


def _own(entry: Entry) -> list[tuple[str, int, str]]:
    """(file, line, function) of the program's own frames, innermost first."""
    rows = ((f["filename"], f["line"], f["name"]) for f in entry["frames"])
    return [row for row in rows if package_of(row[0]) is None]


def _functions(entry: Entry) -> set[tuple[str, str]]:
    return {(file, name) for file, _, name in _own(entry)}
