"""The messages of a trial's processes, and the process of one trial.

A runner and the process that starts its trials are the same program of the same user, so they send
each other objects as `multiprocessing` does (pickled), over a socket that only the two hold. A
process that trains writes one JSON object per line to a pipe: one that dies leaves its earlier
reports behind, and a full disk loses nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tuner.core.outcome import Raised
from tuner.core.processes import die_with, read_pipe
from tuner.core.records import Configuration, Measurement
from tuner.core.supervised import Tail
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
        for limit in (resource.RLIMIT_DATA, resource.RLIMIT_AS):  # telling needs memory
            _, hard = resource.getrlimit(limit)
            resource.setrlimit(limit, (hard, hard))
        chain = error.links if isinstance(error, RaisedElsewhere) else Raised.chain(error)
        links = [{"kinds": link.kinds, "text": link.text} for link in chain]
        _write(lines, {RAISED: links, AT_S: time.monotonic()})
        # After the line that counts: this one may fail, as when a disk or memory is full.
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    except MemoryError:
        os.write(lines, _NO_MEMORY_TO_SAY_SO)


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


# -- the process of one trial, from its fork to its exit ------------------------------------------


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
    """Run the trial and end this process."""

    def measure(report: Report) -> Measurement:
        _settle(task)
        if task.is_fresh:
            task.body.prepare(task.job, task.options)
        return task.body.measure(task.job, task.configuration, task.options, report)

    tell(task.lines, measure)


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
    # The first to be killed when the machine runs out of memory (proc(5)).
    with contextlib.suppress(OSError):  # where /proc is read-only, the kernel chooses by size
        Path("/proc/self/oom_score_adj").write_text("1000")
    gc.enable()


class ProgressParser(Said):
    """Reads the two pipes of a child: its reports, and its output, whose `tail` it keeps."""

    def __init__(self, lines: int, log: int) -> None:
        super().__init__()
        self.lines, self.log, self.tail = lines, log, Tail()
        for descriptor in (lines, log):
            os.set_blocking(descriptor, False)

    def read(self, descriptor: int) -> tuple[dict[str, Any], bytes | None]:
        """New facts, perhaps none, and what was read of one of the pipes; see `read_pipe`."""
        data = read_pipe(descriptor)
        if descriptor == self.lines:
            return self.take(data or b""), data
        self.tail.add(data or b"")
        return {}, data

    def finish(self) -> dict[str, Any]:
        """Read the rest and close; returns the new facts.

        Doesn't wait for the end of a pipe: a process that couldn't be ended may hold it open.
        """
        new: dict[str, Any] = {}
        for descriptor in (self.lines, self.log):
            facts, data = self.read(descriptor)
            while data:
                new |= facts
                facts, data = self.read(descriptor)
            os.close(descriptor)
        return new
