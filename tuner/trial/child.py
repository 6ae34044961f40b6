"""The process of one trial, from its fork to its exit (`tuner.trial.messages` has its reports)."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tuner.core.processes import die_with, read_pipe
from tuner.core.records import Configuration, Measurement
from tuner.core.supervised import Tail
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.messages import Report, Said, TrialBody, tell


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
    tell(task.lines, functools.partial(_measure, task))


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


def _measure(task: ChildTask, report: Report) -> Measurement:
    _settle(task)
    if task.is_fresh:
        task.body.prepare(task.job, task.options)
    return task.body.measure(task.job, task.configuration, task.options, report)


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
