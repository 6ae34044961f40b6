"""The process of one trial, from its fork to its exit.

It writes its results to a pipe, one JSON object per line. So a process that dies leaves its
earlier reports behind, and a full disk loses nothing.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tuner.core.outcome import Raised
from tuner.core.processes import die_with
from tuner.core.records import Configuration
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.messages import TrialBody
from tuner.trial.ranks import RankFailed

FACTS, RESULT, RAISED = "facts", "result", "raised"
"""Keys of a line: new facts, a measurement, the exceptions that ended the trial."""

_NO_MEMORY_TO_SAY_SO = (
    json.dumps({RAISED: [{"kinds": ["builtins.MemoryError"], "text": ""}]}) + "\n"
).encode()
"""Made beforehand: where memory ran out, there may be none to describe it."""

_FAILED = 70
"""Exit code after an exception (EX_SOFTWARE of sysexits.h)."""


@dataclass(frozen=True, slots=True)
class ChildTask:
    """The task of a child, with the descriptors to write to and those to close.

    `environment` has variables that it gets in addition to those of its parent.
    """

    body: TrialBody
    job: TrialJob
    options: MeasureOptions
    configuration: Configuration
    parent: int
    lines: int
    log: int
    foreign: tuple[int, ...]
    environment: Mapping[str, str]


def child_main(task: ChildTask) -> NoReturn:
    """Run the trial and end this process; none of the parent's code runs after it."""
    code = _FAILED
    try:
        code = _run(task)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        # Neither exit handlers nor destructors: the kernel and the driver free everything.
        os._exit(code)


def _settle(task: ChildTask) -> None:
    """Start a new session that ends with the parent and keeps nothing of it but its code."""
    os.setsid()
    die_with(task.parent)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in task.foreign:
        os.close(descriptor)
    os.environ.update(task.environment)
    tempfile.tempdir = None  # as TMPDIR says
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, *targets in ((nothing, 0), (task.log, 1, 2)):
        for target in targets:
            os.dup2(source, target)
        os.close(source)
    faulthandler.enable()  # the Python stack of a crash goes to the log
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no gigabytes of core files
    # The first to be killed when the machine runs out of memory (proc(5)).
    with contextlib.suppress(OSError):  # where /proc is read-only, the kernel chooses by size
        Path("/proc/self/oom_score_adj").write_text("1000")
    gc.enable()


def _run(task: ChildTask) -> int:
    def report(facts: Mapping[str, Any]) -> None:
        _write(task.lines, {FACTS: dict(facts)})

    try:
        _settle(task)
        measurement = task.body.measure(task.job, task.configuration, task.options, report)
    # The boundary of a trial: whatever it raises, an exit included, is its outcome.
    except BaseException as error:  # noqa: BLE001
        return _say_raised(task.lines, error)
    _write(task.lines, {RESULT: measurement.to_dict()})
    return 0


def _say_raised(lines: int, error: BaseException) -> int:
    try:
        _lift_memory_limit()
        chain = error.links if isinstance(error, RankFailed) else Raised.chain(error)
        links = [{"kinds": link.kinds, "text": link.text} for link in chain]
        _write(lines, {RAISED: links})
        # After the line that counts: this one may fail, as when a disk or memory is full.
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    except MemoryError:
        os.write(lines, _NO_MEMORY_TO_SAY_SO)
    return _FAILED


def _lift_memory_limit() -> None:
    """The limit has done its work; saying so needs memory."""
    for limit in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (hard, hard))


def _write(descriptor: int, line: Mapping[str, Any]) -> None:
    data = (json.dumps(line) + "\n").encode()
    while data:
        data = data[os.write(descriptor, data) :]


LOG_TAIL_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024


class Read(enum.Enum):
    """The result of reading from a pipe."""

    SOME = enum.auto()
    NOTHING_NOW = enum.auto()
    END = enum.auto()


class ProgressParser:
    """Reads the two pipes of a child, and keeps its reports.

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
        """New facts, perhaps none, and True if there was something to read."""
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
        """Read more of the log; True if there was something to read."""
        data = _read(self.log)
        if data:
            self._tail = (self._tail + data)[-LOG_TAIL_BYTES:]
        return _kind(data)

    def finish(self) -> dict[str, Any]:
        """Read the rest and close; returns the new facts.

        Doesn't wait for the end of a pipe: a process that couldn't be ended may hold it open.
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
    """The available data; empty at the end of a pipe, None if there is no data yet."""
    try:
        return os.read(descriptor, _CHUNK_BYTES)
    except BlockingIOError:
        return None


def _kind(data: bytes | None) -> Read:
    if data is None:
        return Read.NOTHING_NOW
    return Read.SOME if data else Read.END
