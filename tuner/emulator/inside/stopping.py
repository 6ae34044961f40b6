"""Ends a program whose time is up: it first tells what its finished steps showed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from tuner.emulator.here import TELL_SIGNAL, TIMEOUT

STOPPED = 124
"""The exit status of a program that was stopped, as that of timeout(1)."""


def end_when_told(tell: Callable[[str], bool | None]) -> None:
    """On `TELL_SIGNAL`, call `tell` with `TIMEOUT` and end this process, if it told something.

    A process that has nothing to tell goes on, without a handler: it may be a launcher.
    """

    def end(number: int, frame: FrameType | None) -> None:
        try:
            if tell(TIMEOUT):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(STOPPED)
        finally:
            signal.signal(number, signal.SIG_IGN)

    if threading.current_thread() is threading.main_thread():
        signal.signal(TELL_SIGNAL, end)
