"""The requests that PyTorch gave up, and those of them that the program met later with less."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

from tuner.emulator.here import device_core
from tuner.emulator.inside.lines import frames_of, package_of

Entry = Mapping[str, Any]
"""An entry of the allocator's history, with its "frames"."""

Row = tuple[str, int, str]
"""The file, the line and the function of a frame."""

Function = tuple[str, str]
"""A file and a function in it."""


class Refusals:
    """The refused requests of this process, in their order.

    `place_of` names the library's and the program's line of an entry.
    """

    def __init__(self, place_of: Callable[[Any], tuple[str, str]]) -> None:
        self._place_of = place_of
        self._refused: list[dict[str, Any]] = []
        self._stepped_us: dict[frozenset[Function], int] = {}

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

    def note_step(self, time_us: int, frame: FrameType | None) -> None:
        """Note the functions in which a step ended."""
        own = ((file, name) for file, _, name in frames_of(frame) if package_of(file) is None)
        self._stepped_us[frozenset(own)] = time_us

    @property
    def times_us(self) -> list[int]:
        """The times of the refusals."""
        return [one["time_us"] for one in self._refused]

    def recovered(self, histories: Iterable[Iterable[Entry]]) -> list[int]:
        """The numbers of the requests whose line got as much or less later.

        So a search for the batch size goes on. Another line, as of a fallback to something else,
        does not tell that what was refused is not needed, nor does another caller: an evaluation
        and the training share the lines of their model. A call in another line counts if it trains,
        or if the first call had got less before.
        """
        made = [e for history in histories for e in history if e["action"] == "alloc"]
        return [n for n, one in enumerate(self._refused) if self._is_met(one, made)]

    def _is_met(self, refused: Entry, made: Sequence[Entry]) -> bool:
        place, own = self._place_of(refused), _own(refused)
        functions = _functions(own)
        less = [e for e in made if e["size"] <= refused["size"] and _own(e)[:1] == own[:1]]
        has_got_less = any(_own(entry) == own for entry in less)
        for entry in less:
            if entry["time_us"] <= refused["time_us"] or self._place_of(entry) != place:
                continue
            found = _own(entry)
            if _functions(found) <= functions and (has_got_less or self._trains(refused, found)):
                return True
        return False

    def _trains(self, refused: Entry, later: Sequence[Row]) -> bool:
        """True if steps end later in what was called where the two calls part."""
        pairs = itertools.zip_longest(reversed(_own(refused)), reversed(later))
        after = itertools.dropwhile(lambda pair: pair[0] == pair[1], pairs)
        called = [row for row, _ in after if row is not None][1:2]
        return any(
            time_us > refused["time_us"] and _functions(called) <= functions
            for functions, time_us in self._stepped_us.items()
        )


def _own(entry: Entry) -> list[Row]:
    """(file, line, function) of the program's own frames, innermost first."""
    rows = ((f["filename"], f["line"], f["name"]) for f in entry["frames"])
    return [row for row in rows if package_of(row[0]) is None]


def _functions(rows: Iterable[Row]) -> set[Function]:
    return {(file, name) for file, _, name in rows}
