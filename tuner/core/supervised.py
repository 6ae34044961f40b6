"""Runs a program under a supervisor process, so that none of its processes is left behind.

docs/notebook/trials.md says which process ends which. This side starts the supervisor
(`tuner.core.supervisor`), tells it when to end the program, and receives the result.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import IO, Any, Literal

from tuner.core.environment import own_python
from tuner.core.errors import InputError, UnavailableError
from tuner.core.outcome import signal_name
from tuner.core.processes import end_marked

END_WITHIN_S = 10.0
"""Processes of a program have this long to disappear after they were killed."""

TELL_WITHIN_S = 15.0
"""Processes of a program have this long to send their results when its time is up."""

TAIL_BYTES = 64 * 1024

_ANSWER_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.05

StoppedBy = Literal["timeout", "caller"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTask:
    """A program to run: its command line, all its environment, its folder (None: this one).

    - `mark` ("NAME=value") is added to the environment of its processes, and is in no other's.
    - `is_quiet` keeps the end of its output instead of printing it; `run_supervised` sets it.
    - When `timeout_s` is over, `tell_signal` is sent to those of its processes that have a handler
      for it; they get `TELL_WITHIN_S` to send their results and to end.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    mark: str
    cwd: str | None = None
    is_quiet: bool = False
    timeout_s: float | None = None
    tell_signal: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """The end of a program. `left` are its processes that could not be ended; all others are gone.

    `exit_status` is as in `subprocess`. `stopped_by` says why tuner ended the program: "timeout"
    or "caller"; None if it ended by itself. `tail` is the end of its output, if that was kept.
    """

    exit_status: int
    stopped_by: StoppedBy | None = None
    tail: bytes = b""
    left: tuple[int, ...] = ()


@dataclass(slots=True)
class Tail:
    """The end of an output: its last `most` bytes."""

    data: bytes = b""
    most: int = TAIL_BYTES

    def add(self, data: bytes) -> None:
        """Take what was written next."""
        self.data = (self.data + data)[-self.most :]

    @property
    def text(self) -> str:
        """The bytes that are kept, as text."""
        return self.data.decode(errors="replace")


class Helper:
    """A process that runs the `command` of a module of tuner, and the connection to it.

    Its last argument, which is added, is the descriptor of the process's end of the connection, on
    which `first` is sent. It prints to `output`, by default to the output of this process, and its
    errors to `errors`, by default there too. It also gets the descriptors `keep`.
    """

    def __init__(
        self,
        command: Sequence[str],
        first: object,
        output: IO[Any] | int | None,
        *,
        errors: IO[Any] | None = None,
        environment: Mapping[str, str] | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 - this program itself
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *keep],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output if errors is None else errors,
                # Ctrl-C in the terminal reaches this process only, which decides.
                start_new_session=True,
                env=environment,
            )
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        with contextlib.suppress(ConnectionError):  # it has ended, which is seen later
            self.connection.send(first)

    def close(self, within_s: float) -> int:
        """Close the connection, at which the process ends; it is killed if it doesn't in time.

        Returns its exit code.
        """
        self.connection.close()
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Supervised(Helper):
    """A program that has been started under `tuner.core.supervisor`, and ends with this process."""

    def __init__(
        self, task: ProgramTask, output: IO[Any] | None = None, errors: IO[Any] | None = None
    ) -> None:
        command = own_python("tuner.core.supervisor", str(os.getpid()))
        super().__init__(command, task, output, errors=errors)
        self._mark = task.mark

    def has_ended(self, within_s: float = 0.0) -> bool:
        """True once the program has ended, after at most `within_s` seconds."""
        try:
            return self.connection.poll(within_s)
        except ConnectionError:
            return True

    def end(self) -> ProgramEnd | str | None:
        """Have the program ended, if it runs; None if the supervisor didn't answer.

        A text says why the operating system couldn't start the program.
        """
        answer = None
        with contextlib.suppress(ConnectionError):  # it has answered meanwhile
            if not self.connection.poll():
                self.connection.send(None)
        with contextlib.suppress(EOFError, ConnectionError):
            if self.connection.poll(2 * END_WITHIN_S + _ANSWER_WITHIN_S):
                answer = self.connection.recv()
        self.close(_ANSWER_WITHIN_S)
        if answer is None:
            end_marked(self._mark, deadline_s=END_WITHIN_S)
        return answer

    def abandon(self) -> None:
        """Have the program ended, without waiting for it."""
        self.connection.close()
        threading.Thread(target=self.process.wait, daemon=True).start()  # reaps it


def run_supervised(
    task: ProgramTask,
    *,
    output: IO[Any] | Tail | None = None,
    errors: IO[Any] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> ProgramEnd:
    """Run a program until it ends, its time is over, or `stopped` says so.

    Its standard input is empty, it has no terminal, and it prints to `output`, by default to the
    output of this process; a `Tail` keeps the end of it. Its errors go to `errors`, by default
    there too. When this function returns or raises, no process, temporary file or shared memory of
    the program is left. Raises `InputError` if it can't be started, and `UnavailableError` if its
    supervisor was killed.
    """
    tail = output if isinstance(output, Tail) else None
    program = Supervised(
        replace(task, is_quiet=tail is not None),
        None if isinstance(output, Tail) else output,
        errors,
    )
    answer: ProgramEnd | str | None = None
    try:
        while not program.has_ended(_LOOK_EVERY_S) and not stopped():
            pass
    finally:
        answer = program.end()
    if isinstance(answer, str):
        raise InputError(f"{task.command[0]!r} cannot be run: {answer}")
    if answer is None:
        code = program.process.returncode
        how = signal_name(-code) if code < 0 else f"exit code {code}"
        raise UnavailableError(
            f"the process that watches the program was ended ({how})",
            hint="see whether memory ran out (`dmesg`)",
        )
    if tail is not None:
        tail.data = answer.tail
    return answer
