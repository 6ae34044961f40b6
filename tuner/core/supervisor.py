"""The supervisor process of a program: ends it in time, and cleans up after it.

It has one thread and inherits every process of the program whose parent ends. When its owner, the
process that asked for the program, ends in any way, it ends the program and itself.

Run as `python -m tuner.core.supervisor OWNER DESCRIPTOR`: the process id of the owner, and one
end of a socket.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from tuner.core import processes, supervised
from tuner.core.leftovers import Leftovers, leftovers

_LOOK_EVERY_S = 1.0
_TOLD_EVERY_S = 0.05


def main() -> int:
    """Run one program for its owner."""
    owner, descriptor = map(int, sys.argv[1:])
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        alive = os.pidfd_open(owner)
    except ProcessLookupError:
        return 1
    if os.getppid() != owner:  # it ended, and its id may mean another process by now
        return 1
    processes.become_subreaper()
    try:
        task: supervised.ProgramTask = connection.recv()
        answer = _run(task, connection, alive)
        with contextlib.suppress(ConnectionError):  # the caller is gone
            connection.send(answer)
    except (EOFError, ConnectionError):
        return 0
    return 0


def _run(
    task: supervised.ProgramTask, connection: Connection[Any, Any], alive: int
) -> supervised.ProgramEnd | str:
    with leftovers(os.getpid()) as found:
        try:
            program = _Program(task, found, (connection.fileno(), alive))
        except OSError as error:
            return error.strerror or str(error)
        except ValueError as error:  # a null byte in its command line
            return str(error)
        try:
            stopped_by = program.follow(task)
        finally:
            found.look(now=True)
            status = processes.end_child(program.pid, deadline_s=supervised.END_WITHIN_S)
            left = processes.end_children(deadline_s=supervised.END_WITHIN_S)
    return supervised.ProgramEnd(
        exit_status=-signal.SIGKILL if status is None else status,
        stopped_by=stopped_by,
        tail=program.last_output(),
        left=left,
    )


class _EndNowError(Exception):
    """The owner has ended, or the owner or a signal asks to end the program."""


class _Program:
    """The running program and its output, until one of `stops` can be read.

    Raises `OSError` if it can't be started.
    """

    def __init__(
        self, task: supervised.ProgramTask, found: Leftovers, stops: tuple[int, ...]
    ) -> None:
        self._found = found
        self._tail = supervised.Tail()
        self._output: int | None = None
        output = None
        if task.is_quiet:
            self._output, output = os.pipe()
            os.set_blocking(self._output, False)
        self.pid = _started(task, found, output)
        if output is not None:
            os.close(output)
        signalled, _ = processes.woken_by(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._stops = (*stops, signalled)
        self._selector = selectors.DefaultSelector()
        ended = os.pidfd_open(self.pid)
        for source in (*self._stops, ended, self._output, found.descriptor):
            if source is not None:
                self._selector.register(source, selectors.EVENT_READ)

    def follow(self, task: supervised.ProgramTask) -> supervised.StoppedBy | None:
        """Listen until the program has ended (None) or is to be ended (why)."""
        until_s = math.inf if task.timeout_s is None else time.monotonic() + task.timeout_s
        try:
            while not processes.has_ended(self.pid):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    if task.tell_signal is not None:
                        self._tell(task.tell_signal)
                    return "timeout"
                self._listen(min(left_s, _LOOK_EVERY_S))
        except _EndNowError:
            return "caller"
        return None

    def last_output(self) -> bytes:
        """The end of what it printed; to be called once, when it has ended."""
        while self._output is not None and self._read():
            pass
        return self._tail.data

    def _tell(self, number: int) -> None:
        """Tell its processes that time is up, and wait until they have sent their results.

        A process that has done so ends, or no longer has a handler.
        """
        me = os.getpid()
        told = [pid for pid in processes.descendants(me) if processes.tell(pid, number, below=me)]
        until_s = time.monotonic() + supervised.TELL_WITHIN_S
        while any(processes.handles(pid, number) for pid in told) and time.monotonic() < until_s:
            self._listen(_TOLD_EVERY_S)

    def _listen(self, within_s: float) -> None:
        """Read the output that arrives within the time. Raises `_EndNowError`."""
        ready = [
            key.fd for key, _ in self._selector.select(min(within_s, self._found.look_within_s))
        ]
        if any(stop in ready for stop in self._stops):
            raise _EndNowError
        self._found.look()
        if self._output in ready and not self._read():
            self._selector.unregister(self._output)

    def _read(self) -> bool:
        """Read more of its output; True if there was any."""
        assert self._output is not None
        data = (
            processes.read_pipe(self._output) or b""
        )  # a process that couldn't be ended may hold it open
        self._tail.add(data)
        return bool(data)


def _started(task: supervised.ProgramTask, found: Leftovers, output: int | None) -> int:
    """The process id of the program, which has just been started."""
    owner = os.getpid()
    name, _, value = task.mark.partition("=")
    process = subprocess.Popen(  # noqa: S603 - the user's own program
        task.command,
        env={**task.environment, **found.environment, name: value},
        cwd=task.cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        # It then has no terminal: reading from one gives an error, and doesn't stop the program.
        start_new_session=True,
        preexec_fn=lambda: processes.die_with(owner),  # noqa: PLW1509 - this process has one thread
    )
    process.returncode = 0  # it is reaped by `end_child`
    return process.pid


if __name__ == "__main__":
    sys.exit(main())
