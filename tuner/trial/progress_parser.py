"""What is heard of the process of a trial: its lines, and the end of its log."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping
from typing import Any

from tuner.core.outcome import Raised
from tuner.trial.child import FACTS, RAISED, RESULT

LOG_TAIL_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024


class Read(enum.Enum):
    """What came of reading from a pipe."""

    SOME = enum.auto()
    NOTHING_NOW = enum.auto()
    END = enum.auto()


class ProgressParser:
    """Reads the two pipes of a child, and keeps what it said.

    - `facts` has the last value of each name that it reported.
    - `measurement` is its result, `raised` the exceptions that ended it.
    """

    def __init__(self, lines: int, log: int) -> None:
        self.lines, self.log = lines, log
        self.facts: dict[str, Any] = {}
        self.measurement: Mapping[str, Any] | None = None
        self.raised: tuple[Raised, ...] = ()
        self._rest = b""
        self._tail = b""
        for descriptor in (lines, log):
            os.set_blocking(descriptor, False)

    @property
    def log_tail(self) -> str:
        """The last 64 KiB of what it and its helpers wrote to stdout and stderr."""
        return self._tail.decode(errors="replace")

    def read_lines(self) -> tuple[dict[str, Any], Read]:
        """Facts that are new, perhaps none, and whether there was something to read."""
        data = _read(self.lines)
        new: dict[str, Any] = {}
        if data:
            *whole, self._rest = (self._rest + data).split(b"\n")
            for line in whole:
                new |= self._take(line)
            self.facts |= new
        return new, _kind(data)

    def _take(self, line: bytes) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(line)
        if RESULT in said:
            self.measurement = said[RESULT]
        if RAISED in said:
            self.raised = tuple(
                Raised(tuple(link["kinds"]), str(link["text"])) for link in said[RAISED]
            )
        facts: dict[str, Any] = said.get(FACTS, {})
        return facts

    def read_log(self) -> Read:
        """Read on in the log; returns whether there was something to read."""
        data = _read(self.log)
        if data:
            self._tail = (self._tail + data)[-LOG_TAIL_BYTES:]
        return _kind(data)

    def finish(self) -> dict[str, Any]:
        """Read what is left and close; returns the facts that are new.

        Stops also where nothing is left for now: a process that could not be ended may hold a
        pipe open.
        """
        new: dict[str, Any] = {}
        more = Read.SOME
        while more is Read.SOME:
            facts, more = self.read_lines()
            new |= facts
        while self.read_log() is Read.SOME:
            pass
        os.close(self.lines)
        os.close(self.log)
        return new


def _read(descriptor: int) -> bytes | None:
    """What there is to read; empty at the end of a pipe, None when there is nothing for now."""
    try:
        return os.read(descriptor, _CHUNK_BYTES)
    except BlockingIOError:
        return None


def _kind(data: bytes | None) -> Read:
    if data is None:
        return Read.NOTHING_NOW
    return Read.SOME if data else Read.END
