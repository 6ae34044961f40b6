"""The exception that ends a process of the program, whoever shows it.

Exception hooks are replaced (rich), and exceptions are turned into an exit status (hydra, workers
of multiprocessing). So the interpreter is asked what nobody caught, `sys.exit` and `os._exit` are
watched for the exception that is being handled, and `traceback` for what it prints.

`sitecustomize` runs this file in every process before the program. It never imports `tuner`: the
program's environment need not have it, and may have another module of that name.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

UNCAUGHT, EXIT, SHOWN = "uncaught", "exit", "shown"
"""How an exception ended its process: uncaught, handled by an exit, or only printed."""

_MOST_TEXT = 4000
_MOST_CAUSES = 8


class Failing:
    """Keeps the exception that a process ends of, and tells it as an event at the end."""

    def __init__(self) -> None:
        self._found: dict[str, Any] | None = None

    def note(self, how: str, error: BaseException | None) -> None:
        """Keep the text of `error`. What ended the process beats what was only printed."""
        if error is None or isinstance(error, (SystemExit, KeyboardInterrupt)):
            return
        if how != SHOWN or self._found is None or self._found["how"] == SHOWN:
            self._found = {"how": how, **described(error)}

    def note_exit(self, code: object) -> None:
        """`sys.exit` was called: with an exception at hand, or with a text of its own."""
        if isinstance(code, str):
            text = code[:_MOST_TEXT]
            no_more: dict[str, Any] = {"line": None, "causes": []}
            self._found = {"how": EXIT, "type": "SystemExit", "message": text, **no_more}
        elif code:
            self.note(EXIT, sys.exc_info()[1])

    def tell(self) -> None:
        """Send what the process ends of, once."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            self.note(UNCAUGHT, error)
        if self._found is not None:
            found, self._found = self._found, None
            send({"event": "error", "on_device": uses_cuda(), **found})


def described(error: BaseException) -> dict[str, Any]:
    """The type, the text and the program's line of an exception, and the texts of its causes."""
    try:
        frames = traceback.extract_tb(error.__traceback__)
        line = sibling("lines").program_line(None, frames=frames)
    except Exception:  # noqa: BLE001 - a failing program is told without its line, not twice
        line = None
    causes: list[str] = []
    cause = error.__cause__ or error.__context__
    while cause is not None and len(causes) < _MOST_CAUSES:
        causes.append(f"{name_of(cause)}: {text_of(cause)}")
        cause = cause.__cause__ or cause.__context__
    return {"type": name_of(error), "message": text_of(error), "line": line, "causes": causes}


def follow_failures() -> None:
    """Watch the ways in which this process, and those that it forks, can fail."""
    failing = Failing()
    leave, leave_at_once = sys.exit, os._exit

    @functools.wraps(leave)
    def note_and_leave(status: Any = None, /) -> NoReturn:
        failing.note_exit(status)
        leave(status)

    @functools.wraps(leave_at_once)
    def tell_and_leave(status: int) -> NoReturn:
        if status:
            failing.tell()
        leave_at_once(status)

    build: Any = traceback.TracebackException.__init__

    @functools.wraps(build)
    def note_and_build(self: Any, kind: Any, error: Any, *args: Any, **kwargs: Any) -> None:
        build(self, kind, error, *args, **kwargs)
        if kwargs.get("_seen") is None:  # not of a cause
            failing.note(SHOWN, error)

    sys.exit, os._exit = note_and_leave, tell_and_leave
    printed: Any = traceback.TracebackException
    printed.__init__ = note_and_build
    atexit.register(failing.tell)


def send(event: dict[str, Any]) -> None:
    """Append `event`; a line is written at once, so that lines of processes do not mix."""
    import json

    rank = os.environ.get("RANK", "0")
    about = {"pid": os.getpid(), "rank": rank, "at_ns": time.monotonic_ns()}
    line = json.dumps({**about, **event}).encode() + b"\n"
    file = os.open(os.environ["TUNER_EMULATOR_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(file, line)
    finally:
        os.close(file)


@functools.cache
def sibling(name: str) -> Any:
    """The module beside this file, without the package that it is part of."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_tuner_emulator_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(error: BaseException) -> str:
    """The full name of an exception's type."""
    return f"{type(error).__module__}.{type(error).__qualname__}"


def text_of(error: BaseException) -> str:
    """The text of an exception, cut; empty where it has none."""
    try:
        return str(error)[:_MOST_TEXT]
    except Exception:  # noqa: BLE001 - the program's own __str__
        return ""


def uses_cuda() -> bool:
    """Whether this process has begun to use the device."""
    torch = sys.modules.get("torch")
    try:
        return bool(torch is not None and torch.cuda.is_initialized())
    except AttributeError:  # torch is half imported
        return False
