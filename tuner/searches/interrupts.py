"""Ctrl-C: the first one asks the search to end, the second one ends the program.

SIGTERM and SIGHUP (a closed terminal or a broken connection) count as well. Repeated SIGTERMs count
once, because `timeout` sends one to its child and another to the process group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANG_UP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # POSIX only
LAST_DEFERRED = 2


class Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP of the main thread; elsewhere it does nothing.

    Python lets only the main thread set handlers, and only it receives signals. An ignored SIGHUP,
    as under nohup, stays ignored.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._seen = 0
        self._terminated = False
        self._deferring = False
        self._signals: tuple[signal.Signals, ...] = SIGNALS
        if HANG_UP is not None and signal.getsignal(HANG_UP) is not signal.SIG_IGN:
            self._signals = (*SIGNALS, HANG_UP)
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Install the handlers for the block, and restore the earlier ones afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in self._signals}
        self._install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Delay the second signal until the end of the block; a third one is not delayed.

        Use it for the few seconds in which Ray starts or ends its processes: an interruption there
        would leave some of them behind.
        """
        self._deferring = True
        seen_before = self._seen
        try:
            with _hang_up_blocked():
                yield
        finally:
            self._deferring = False
            if threading.current_thread() is threading.main_thread():
                self._install()  # `ray.init` sets a handler of its own for SIGTERM
        if self._seen > max(1, seen_before):
            raise KeyboardInterrupt

    def _install(self) -> None:
        for number in self._signals:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._terminated:
            return
        self._terminated = self._terminated or number == signal.SIGTERM
        self._seen += 1
        if number == HANG_UP:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # writing to a closed terminal would fail
            for descriptor in self._terminals:
                os.dup2(nowhere, descriptor)
            os.close(nowhere)
        if self._seen == 1:
            self._on_first()
        elif not self._deferring or self._seen > LAST_DEFERRED:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _hang_up_blocked() -> Iterator[None]:
    """Delay SIGHUP until the end of the block, and keep it from processes started inside.

    A shell that ends sends SIGHUP to all processes of its jobs. Ray's processes, which inherit the
    blocked signals, would otherwise end before the search does.
    """
    if HANG_UP is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {HANG_UP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
