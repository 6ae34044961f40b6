"""Faults of tuner's own code inside a program: reported once, never raised into the program."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tuner.emulator.inside.failing import name_of, send, text_of

_P = ParamSpec("_P")
_R = TypeVar("_R")

_OURS = str(Path(__file__).parents[2])

NOTED: list[dict[str, Any]] = []
"""The first fault of this process: its type, text and line, and the thing that was being read."""


def note(error: Exception, reading: str) -> None:
    """Report a fault of tuner while `reading` something; later ones may be due to the first."""
    if NOTED:
        return
    ours = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_OURS)]
    fault = {
        "type": name_of(error),
        "message": text_of(error),
        "line": f"{Path(*Path(ours[-1].filename).parts[-2:])}:{ours[-1].lineno}" if ours else None,
        "reading": reading,
    }
    NOTED.append(fault)
    with contextlib.suppress(OSError):  # the session has ended
        send({"event": "fault", **fault})


def guarded(reading: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R | None]]:
    """A decorator for tuner's code in the program's calls: if it raises, it returns None."""

    def around(function: Callable[_P, _R]) -> Callable[_P, _R | None]:
        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - tuner's fault must not stop the program
                note(error, reading)
                return None

        return run

    return around
