"""The warm process: has imported everything once, and forks one child for each trial.

It has one thread and never touches a device, so that a fork of it is a clean start that costs
milliseconds. It outlives its trials and nothing else: when the process that started it ends,
however that ends, it ends its trial with all that the trial started, and itself.

Run as `python -m tuner.trial.warm DESCRIPTOR`, with one end of a socket.
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
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from tuner.core.errors import TunerError, UnavailableError
from tuner.core.leftovers import Leftovers, leftovers
from tuner.core.outcome import Ending
from tuner.core.processes import (
    become_subreaper,
    end_child,
    end_children,
    has_ended,
    oom_kills,
    oom_kills_since,
)
from tuner.core.records import Configuration
from tuner.predict.training import load_object
from tuner.trial.base import Instructions, MeasureOptions
from tuner.trial.child import ChildTask, ProgressParser, Read, child_main
from tuner.trial.messages import (
    CannotRun,
    Ended,
    Ready,
    Reported,
    Run,
    Start,
    Stop,
    TrialBody,
)
from tuner.trial.stop_rule import Deadline

END_WITHIN_S = 20.0
"""A killed process that uses a GPU ends when the driver has taken back its memory."""
_LOOK_AGAIN_S = 2.0
"""Interval for checking that the supervising process still lives."""


class Stopped(enum.Enum):
    """Why a child that had not ended was to be ended."""

    TIME_IS_UP = enum.auto()
    GIVEN_UP = enum.auto()


def main() -> int:
    """Serve one runner until it goes away."""
    connection: Connection = Connection(int(sys.argv[1]))
    supervisor = os.getppid()
    become_subreaper()
    try:
        warm = _prepared(connection.recv(), connection, supervisor)
        if warm is None:
            return 1
        while True:
            message = connection.recv()
            if isinstance(message, Run):
                configuration = Configuration(message.configuration)
                connection.send(Ended(warm.run(configuration, message.instructions)))
    except (EOFError, ConnectionError):
        return 0
    finally:
        end_children(deadline_s=END_WITHIN_S)


def _prepared(start: Start, connection: Connection, supervisor: int) -> WarmProcess | None:
    """Ready to fork; None when no trial can be run, which has been said then."""
    os.environ.pop("PYTHONPATH", None)
    if start.python_path is not None:
        os.environ["PYTHONPATH"] = start.python_path
    try:
        body: TrialBody = load_object(start.body, "trial body")
        body.prepare(start.job, start.options)
        _require_one_thread()
    except TunerError as error:
        connection.send(CannotRun(error))
        return None
    # What is here now lives as long as this process: the collector of a child need not look at
    # it, and so does not copy its pages.
    gc.collect()
    gc.freeze()
    connection.send(Ready())
    return WarmProcess(start, body, connection, supervisor)


def _require_one_thread() -> None:
    """A fork copies one thread only; locks that another one held stay locked in the copy."""
    tasks = len(list(Path("/proc/self/task").iterdir()))
    if tasks > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise UnavailableError(
            f"the process that starts trials has {tasks} threads (of Python: {names}), and must "
            "have one",
            hint="a library starts threads while it is imported",
        )


class WarmProcess:
    """Runs trials one after the other, each in a fork of this process."""

    def __init__(
        self, start: Start, body: TrialBody, connection: Connection, supervisor: int
    ) -> None:
        self._start = start
        self._body = body
        self._connection = connection
        self._supervisor = supervisor
        # The end of a child wakes the selector: its signal writes to this pipe.
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def run(self, configuration: Configuration, instructions: Instructions) -> Ending:
        """Run one trial to its end. Raises EOFError when the supervising process is gone."""
        kills_before = oom_kills()
        started_s = time.monotonic()
        options = replace(self._start.options, instructions=instructions)
        deadline = Deadline(options.timeout_s, started_s)
        with leftovers(os.getpid()) as found:
            child, heard = self._fork(configuration, options, found)
            try:
                stopped = self._watch(child, heard, deadline, found)
            finally:
                found.look(now=True)
                exit_code = end_child(child, deadline_s=END_WITHIN_S)
                left = end_children(deadline_s=END_WITHIN_S)
                last_facts = heard.finish()
        if last_facts:
            self._connection.send(Reported(last_facts))
        timed_out = stopped is Stopped.TIME_IS_UP
        return Ending(
            device=self._start.options.device,
            exit_code=exit_code,
            facts=heard.facts,
            measurement=heard.measurement,
            raised=heard.raised,
            log_tail=heard.log_tail,
            timed_out_after_s=deadline.limit_s if timed_out else None,
            given_up=stopped is Stopped.GIVEN_UP,
            oom_kills=oom_kills_since(kills_before),
            left_processes=left,
            duration_s=time.monotonic() - started_s,
        )

    def _fork(
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
        child = os.fork()
        if child == 0:
            child_main(task)
        os.close(lines_write)
        os.close(log_write)
        return child, ProgressParser(lines_read, log_read)

    def _watch(
        self, child: int, heard: ProgressParser, deadline: Deadline, found: Leftovers
    ) -> Stopped | None:
        """Listen until the child has ended (None) or is to be ended (why)."""
        sources: list[int | Connection] = [heard.lines, heard.log, self._woken, self._connection]
        if found.descriptor is not None:
            sources.append(found.descriptor)
        with selectors.DefaultSelector() as selector:
            for source in sources:
                selector.register(source, selectors.EVENT_READ)
            while not has_ended(child):
                left_s = deadline.left_s(time.monotonic())
                if left_s <= 0:
                    return Stopped.TIME_IS_UP
                ready = selector.select(min(left_s, _LOOK_AGAIN_S, found.look_within_s))
                found.look()
                for key, _ in ready:
                    if key.fileobj is self._connection:
                        if isinstance(self._connection.recv(), Stop):
                            return Stopped.GIVEN_UP
                    elif (
                        key.fd != found.descriptor
                        and self._listen(heard, key.fd, deadline) is Read.END
                    ):
                        selector.unregister(key.fd)
                if os.getppid() != self._supervisor:
                    raise EOFError("the process that supervises this one has ended")
        return None

    def _listen(self, heard: ProgressParser, descriptor: int, deadline: Deadline) -> Read:
        if descriptor == heard.log:
            return heard.read_log()
        if descriptor == heard.lines:
            facts, read = heard.read_lines()
            if facts:
                deadline.hear(facts, time.monotonic())
                self._connection.send(Reported(facts))
            return read
        os.read(descriptor, 1024)
        return Read.SOME


if __name__ == "__main__":
    sys.exit(main())
