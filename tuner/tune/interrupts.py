"""Ctrl-C: the first one asks the search to end, the second one ends the program."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAST_DEFERRED = 2


class Interrupts:
    """Handles SIGINT and SIGTERM of the main thread; elsewhere it does nothing.

    Python lets only the main thread set handlers, and signals arrive only there.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._seen = 0
        self._deferring = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handlers are in place inside, and as before afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self._install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """The second signal waits until the end of the block; a third one does not.

        For the few seconds in which Ray starts or ends its processes: broken off there, it
        leaves some behind.
        """
        self._deferring = True
        seen_before = self._seen
        try:
            yield
        finally:
            self._deferring = False
            if threading.current_thread() is threading.main_thread():
                self._install()  # `ray.init` sets a handler of its own for SIGTERM
        if self._seen > max(1, seen_before):
            raise KeyboardInterrupt

    def _install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._seen += 1
        if self._seen == 1:
            self._on_first()
        elif not self._deferring or self._seen > LAST_DEFERRED:
            raise KeyboardInterrupt
