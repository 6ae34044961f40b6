"""The warm process: has imported everything once, and forks one child for each trial.

It has one thread of Python's and never touches a device, so that a fork of it is a clean start
that costs milliseconds. If libraries have started threads of their own, a fork may find their
locks held: one that hangs is replaced by a fresh process, as are those after it. It outlives its
trials and nothing else: when the process that started it ends, however that ends, it ends its
trial with all that the trial started, and itself.

Run as `python -m tuner.trial.warm DESCRIPTOR`, with one end of a socket. A fresh process of a trial
is the same, with a `ChildTask` as its first message.
"""

from __future__ import annotations

import enum
import gc
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from tuner.core import processes
from tuner.core.environment import search_path, your_python
from tuner.core.errors import TunerError, UnavailableError
from tuner.core.leftovers import Leftovers, leftovers
from tuner.core.outcome import Ending
from tuner.core.records import Configuration
from tuner.core.supervised import Helper
from tuner.predict.training import load_object
from tuner.trial.base import Instructions, MeasureOptions
from tuner.trial.messages import ChildTask, ProgressParser, Run, Start, TrialBody, child_main
from tuner.trial.stop_rule import STARTED_AGAIN, Deadline

END_WITHIN_S = 20.0
"""A killed process that uses a GPU ends when the driver has taken back its memory."""
_LOOK_AGAIN_S = 2.0
"""Interval for checking that the supervising process still lives."""
_HANGS_S, _HANGS_BELOW_S = 20.0, 0.1
"""A fork hangs if it has used no more than the second as processor time within the first."""


class _Stopped(enum.Enum):
    """Why a child that had not ended was to be ended."""

    TIME_IS_UP = enum.auto()
    GIVEN_UP = enum.auto()
    HANGS = enum.auto()


def main() -> int:
    """Serve one runner until it goes away."""
    connection: Connection = Connection(int(sys.argv[1]))
    supervisor = os.getppid()
    processes.become_subreaper()
    try:
        message = connection.recv()
        if isinstance(message, ChildTask):
            connection.close()
            child_main(message)
        warm = _prepared(message, connection, supervisor)
        if warm is None:
            return 1
        while True:
            message = connection.recv()
            if isinstance(message, Run):
                configuration = Configuration(message.configuration)
                connection.send(warm.run(configuration, message.instructions))
    except (EOFError, ConnectionError):
        return 0
    finally:
        processes.end_children(deadline_s=END_WITHIN_S)


def _prepared(start: Start, connection: Connection, supervisor: int) -> _WarmProcess | None:
    """Ready to fork; None when no trial can be run, which has been said then."""
    os.environ.pop("PYTHONPATH", None)
    if start.python_path is not None:
        os.environ["PYTHONPATH"] = start.python_path
    try:
        body: TrialBody = load_object(start.body, "trial body")
        body.prepare(start.job, start.options)
        # A fork copies one thread only; locks that another one held stay locked in the copy.
        others = [one.name for one in threading.enumerate() if one is not threading.main_thread()]
        if others:
            raise UnavailableError(
                f"the process that starts trials has threads of Python: {', '.join(others)}",
                hint="a module starts them while it is imported: let its first use start them",
            )
    except TunerError as error:
        connection.send(error)
        return None
    # What is here now lives as long as this process: the collector of a child need not look at
    # it, and so does not copy its pages.
    gc.collect()
    gc.freeze()
    connection.send(None)
    return _WarmProcess(start, body, connection, supervisor)


class _Stillness:
    """Tells whether a process and its descendants use next to no processor time."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._used_s, self._since_s = 0.0, time.monotonic()

    def hangs(self) -> bool:
        """True if they have waited for `_HANGS_S`, as for a lock that nothing will release."""
        used_s = processes.processor_s(self._process)
        if abs(used_s - self._used_s) > _HANGS_BELOW_S:
            self._used_s, self._since_s = used_s, time.monotonic()
        return time.monotonic() - self._since_s > _HANGS_S


class _WarmProcess:
    """Runs trials one after the other, each in a fork of this process or in a fresh one."""

    def __init__(
        self, start: Start, body: TrialBody, connection: Connection, supervisor: int
    ) -> None:
        self._start = start
        self._body = body
        self._connection = connection
        self._supervisor = supervisor
        self._threads = processes.native_threads()
        self._forks = True
        # The end of a child wakes the selector.
        self._woken, self._wake = processes.woken_by(signal.SIGCHLD)

    def run(self, configuration: Configuration, instructions: Instructions) -> Ending:
        """Run one trial to its end. Raises EOFError when the supervising process is gone."""
        kills_before = processes.oom_kills()
        started_s = time.monotonic()
        options = replace(self._start.options, instructions=instructions)
        deadline = Deadline(options.timeout_s, started_s)
        stopped: _Stopped | None = _Stopped.HANGS
        with leftovers(os.getpid()) as found:
            while stopped is _Stopped.HANGS:
                child, heard = self._start_child(configuration, options, found)
                try:
                    stopped = self._watch(child, heard, deadline, found)
                finally:
                    found.look(now=True)
                    exit_code = processes.end_child(child, deadline_s=END_WITHIN_S)
                    left = processes.end_children(deadline_s=END_WITHIN_S)
                    last_facts = heard.finish()
                if stopped is _Stopped.HANGS:
                    self._forks = False
                    self._report({STARTED_AGAIN: True}, deadline)
        if last_facts:
            self._connection.send(last_facts)
        timed_out = stopped is _Stopped.TIME_IS_UP
        return Ending(
            device=self._start.options.device,
            exit_code=exit_code,
            facts=heard.facts,
            measurement=self._noted(heard.measurement),
            raised=heard.raised,
            log_tail=heard.tail.text,
            timed_out_after_s=deadline.limit_s if timed_out else None,
            given_up=stopped is _Stopped.GIVEN_UP,
            oom_kills=processes.oom_kills_since(kills_before),
            left_processes=left,
            duration_s=time.monotonic() - started_s,
        )

    def _noted(self, measurement: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The measurement, with the threads beside which its process was forked."""
        if measurement is None or not self._threads:
            return measurement
        note = f"libraries started threads before the trial: {', '.join(self._threads)}"
        if not self._forks:
            note += "; a fork beside them hung, so the trial ran in a fresh process"
        return {**measurement, "notes": [*measurement.get("notes", ()), note]}

    def _start_child(
        self, configuration: Configuration, options: MeasureOptions, found: Leftovers
    ) -> tuple[int, ProgressParser]:
        """The new child, and what will be heard of it."""
        ours = (self._connection.fileno(), self._woken, self._wake, *found.foreign)
        lines_read, lines_write = os.pipe()
        log_read, log_write = os.pipe()
        task = ChildTask(
            body=self._body,
            job=self._start.job,
            options=options,
            configuration=configuration,
            parent=os.getpid(),
            lines=lines_write,
            log=log_write,
            foreign=(*ours, lines_read, log_read),
            environment=found.environment,
        )
        child = self._fresh(task) if not self._forks else os.fork()
        if child == 0:
            child_main(task)
        os.close(lines_write)
        os.close(log_write)
        return child, ProgressParser(lines_read, log_read)

    def _fresh(self, task: ChildTask) -> int:
        """A new process with a task, which imports everything once more."""
        path = {"PYTHONPATH": self._start.python_path or ""}
        own = replace(task, foreign=(), environment={**task.environment, **path}, is_fresh=True)
        helper = Helper(
            your_python("tuner.trial.warm"),
            own,
            task.log,
            environment={**os.environ, "PYTHONPATH": search_path()},
            keep=(task.lines, task.log),
        )
        helper.connection.close()
        helper.process.returncode = 0  # it is waited for as forks are
        return helper.process.pid

    def _watch(
        self, child: int, heard: ProgressParser, deadline: Deadline, found: Leftovers
    ) -> _Stopped | None:
        """Listen until the child has ended (None) or is to be ended (why)."""
        sources: list[int | Connection] = [heard.lines, heard.log, self._woken, self._connection]
        if found.descriptor is not None:
            sources.append(found.descriptor)
        still = _Stillness(child) if self._threads and self._forks else None
        with selectors.DefaultSelector() as selector:
            for source in sources:
                selector.register(source, selectors.EVENT_READ)
            while not processes.has_ended(child):
                left_s = deadline.left_s(time.monotonic())
                if left_s <= 0:
                    return _Stopped.TIME_IS_UP
                ready = selector.select(min(left_s, _LOOK_AGAIN_S, found.look_within_s))
                found.look()
                for key, _ in ready:
                    if key.fileobj is self._connection:
                        if self._connection.recv() is None:
                            return _Stopped.GIVEN_UP
                    elif key.fd == self._woken:
                        os.read(self._woken, 1024)
                    elif key.fd != found.descriptor:
                        facts, data = heard.read(key.fd)
                        self._report(facts, deadline)
                        if data == b"":
                            selector.unregister(key.fd)
                if still is not None and "first_step_s" not in heard.facts and still.hangs():
                    return _Stopped.HANGS
                if os.getppid() != self._supervisor:
                    raise EOFError("the process that supervises this one has ended")
        return None

    def _report(self, facts: Mapping[str, Any], deadline: Deadline) -> None:
        if facts:
            deadline.hear(facts, time.monotonic())
            self._connection.send(facts)


if __name__ == "__main__":
    sys.exit(main())
