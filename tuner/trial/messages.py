"""The messages of a trial's processes.

A runner and the process that starts its trials are the same program of the same user, so they send
each other objects as `multiprocessing` does (pickled), over a socket that only the two hold. A
process that trains writes one JSON object per line to a pipe: one that dies leaves its earlier
reports behind, and a full disk loses nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from tuner.core.outcome import Raised
from tuner.core.records import Configuration, Measurement
from tuner.trial.base import PLAIN, Instructions, MeasureOptions, TrialJob

Report = Callable[[Mapping[str, Any]], None]
"""Called with new facts (JSON types) of a trial; see `Ending.facts`."""


class TrialBody(Protocol):
    """The work that the processes of a runner do."""

    def prepare(self, job: TrialJob, options: MeasureOptions) -> None:
        """Called once, in the process from which trials are forked: import what they need.

        Must start no thread of Python's, and must not touch a device. Raises `TunerError`
        if no trial of the job can run.
        """

    def measure(
        self, job: TrialJob, configuration: Configuration, options: MeasureOptions, report: Report
    ) -> Measurement:
        """Called in the process of one trial. An exception is the trial's outcome."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what to prepare. `body` is "package.module:object", a `TrialBody`.

    `python_path` is the value of PYTHONPATH that trials are to see. It is answered by None when
    trials can be run, and by the error if none can.
    """

    job: TrialJob
    options: MeasureOptions
    body: str
    python_path: str | None


@dataclass(frozen=True, slots=True)
class Run:
    """Run one trial; None ends it. Answered by the facts that it reports, then by its `Ending`."""

    configuration: Mapping[str, Any]
    instructions: Instructions = PLAIN


FACTS, RESULT, RAISED, AT_S = "facts", "result", "raised", "at_s"
"""Keys of a line: new facts, a measurement, the exceptions that ended the process and when."""

_NO_MEMORY_TO_SAY_SO = (
    json.dumps({RAISED: [{"kinds": ["builtins.MemoryError"], "text": ""}], AT_S: 0.0}) + "\n"
).encode()
"""Made beforehand: where memory ran out, there may be none to describe it."""

FAILED = 70
"""Exit code after an exception (EX_SOFTWARE of sysexits.h)."""


class RaisedElsewhere(Exception):  # noqa: N818 - it says what happened, not that this program erred
    """Another process of the trial raised something: `links` is its chain of exceptions."""

    def __init__(self, message: str, links: tuple[Raised, ...]) -> None:
        super().__init__(message)
        self.links = links


def tell(lines: int, work: Callable[[Report], Measurement]) -> NoReturn:
    """Do `work`, and write its facts and its result, or what it raised. Then end this process.

    None of the code of its parent runs after that.
    """
    code = FAILED
    try:
        try:
            measurement = work(lambda facts: _write(lines, {FACTS: dict(facts)}))
        # The boundary of a trial: whatever it raises, an exit included, is its outcome.
        except BaseException as error:  # noqa: BLE001
            _tell_raised(lines, error)
        else:
            _write(lines, {RESULT: measurement.to_dict()})
            code = 0
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        # Neither exit handlers nor destructors: the kernel and the driver free everything.
        os._exit(code)


def _tell_raised(lines: int, error: BaseException) -> None:
    try:
        _lift_memory_limit()
        chain = error.links if isinstance(error, RaisedElsewhere) else Raised.chain(error)
        links = [{"kinds": link.kinds, "text": link.text} for link in chain]
        _write(lines, {RAISED: links, AT_S: time.monotonic()})
        # After the line that counts: this one may fail, as when a disk or memory is full.
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    except MemoryError:
        os.write(lines, _NO_MEMORY_TO_SAY_SO)


def _lift_memory_limit() -> None:
    """The limit has done its work; saying so needs memory."""
    for limit in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (hard, hard))


def _write(descriptor: int, line: Mapping[str, Any]) -> None:
    data = (json.dumps(line) + "\n").encode()
    while data:
        data = data[os.write(descriptor, data) :]


class Said:
    """Everything that a process has reported.

    - `facts` has the last value of each name.
    - `measurement` is its result, `raised` the exceptions that ended it at `raised_at_s`.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.measurement: Mapping[str, Any] | None = None
        self.raised: tuple[Raised, ...] = ()
        self.raised_at_s = 0.0
        self._rest = b""

    def take(self, data: bytes) -> dict[str, Any]:
        """Read more of its lines; returns the new facts."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        new: dict[str, Any] = {}
        for line in whole:
            said: dict[str, Any] = json.loads(line)
            new |= said.get(FACTS, {})
            self.measurement = said.get(RESULT, self.measurement)
            if RAISED in said:
                links = said[RAISED]
                self.raised = tuple(Raised(tuple(i["kinds"]), str(i["text"])) for i in links)
                self.raised_at_s = said[AT_S]
        self.facts |= new
        return new
