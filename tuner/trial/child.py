"""The process of one trial, from its fork to its exit (`tuner.trial.said` has its reports)."""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import functools
import gc
import os
import resource
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tuner.core.processes import die_with
from tuner.core.records import Configuration, Measurement
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.messages import Report, TrialBody
from tuner.trial.said import FAILED, Said, tell


@dataclass(frozen=True, slots=True)
class ChildTask:
    """The task of a child, with the descriptors to write to and those to close.

    `environment` has variables that it gets in addition to those of its parent. A child `is_fresh`
    if it is no fork: then it has imported nothing.
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
    is_fresh: bool = False


def child_main(task: ChildTask) -> NoReturn:
    """Run the trial and end this process; none of the parent's code runs after it."""
    code = FAILED
    try:
        code = tell(task.lines, functools.partial(_measure, task))
    finally:
        # Neither exit handlers nor destructors: the kernel and the driver free everything.
        os._exit(code)


def _settle(task: ChildTask) -> None:
    """Start a new session that ends with the parent and keeps nothing of it but its code."""
    if not task.is_fresh:  # it has a session
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


def _measure(task: ChildTask, report: Report) -> Measurement:
    _settle(task)
    if task.is_fresh:
        task.body.prepare(task.job, task.options)
    return task.body.measure(task.job, task.configuration, task.options, report)


LOG_TAIL_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024


class Read(enum.Enum):
    """The result of reading from a pipe."""

    SOME = enum.auto()
    NOTHING_NOW = enum.auto()
    END = enum.auto()


class ProgressParser(Said):
    """Reads the two pipes of a child: its reports, and its output."""

    def __init__(self, lines: int, log: int) -> None:
        super().__init__()
        self.lines, self.log = lines, log
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
        return self.take(data) if data else {}, _kind(data)

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
