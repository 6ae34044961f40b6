"""Finds the exception that ends a process of the program, however the program reports it.

Programs replace exception hooks (rich) or turn exceptions into an exit status (hydra, workers of
multiprocessing). So the interpreter's last uncaught exception is read, `sys.exit` and `os._exit`
are watched for the exception that is being handled, and `traceback` for the exceptions it prints.

`sitecustomize` runs this file in every process before the program. It never imports `tuner`: the
program's environment may lack it, or have another module of that name.
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
"""The ways of an exception to end its process: uncaught, by an exit, or only printed."""

_MOST_TEXT = 4000
_MOST_CAUSES = 8


class _Failing:
    """Keeps the exception that ends a process, and sends it as an event at the end."""

    def __init__(self) -> None:
        self._found: dict[str, Any] | None = None
        self._born_ns = time.monotonic_ns()

    def note(self, how: str, error: BaseException | None) -> None:
        """Keep `error`; one that ends the process replaces one that was only printed."""
        if error is None or isinstance(error, (SystemExit, KeyboardInterrupt)):
            return
        if how != SHOWN or self._found is None or self._found["how"] == SHOWN:
            self._found = {"how": how, **described(error)}

    def note_exit(self, code: object) -> None:
        """Keep the text passed to `sys.exit`, or the exception that is being handled."""
        if isinstance(code, str):
            text = code[:_MOST_TEXT]
            no_more: dict[str, Any] = {"line": None, "causes": []}
            self._found = {"how": EXIT, "type": "SystemExit", "message": text, **no_more}
        elif code:
            self.note(EXIT, sys.exc_info()[1])

    def tell(self) -> None:
        """Send the exception that ends the process, once."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            self.note(UNCAUGHT, error)
        if self._found is not None:
            found, self._found = self._found, None
            send({"event": "error", "on_device": uses_cuda(), "born_ns": self._born_ns, **found})


def described(error: BaseException) -> dict[str, Any]:
    """The type, the text and the program's line of an exception, and the texts of its causes."""
    try:
        frames = traceback.extract_tb(error.__traceback__)
        line = sibling("lines").program_line(None, frames=frames)
    except Exception:  # noqa: BLE001 - the failure is reported without a line
        line = None
    causes: list[str] = []
    cause = error.__cause__ or error.__context__
    while cause is not None and len(causes) < _MOST_CAUSES:
        causes.append(f"{name_of(cause)}: {text_of(cause)}")
        cause = cause.__cause__ or cause.__context__
    return {"type": name_of(error), "message": text_of(error), "line": line, "causes": causes}


def follow_failures() -> None:
    """Watch for failures of this process and of the processes that it forks."""
    failing = _Failing()
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
        if kwargs.get("_seen") is None:  # not for a cause
            failing.note(SHOWN, error)

    sys.exit, os._exit = note_and_leave, tell_and_leave
    printed: Any = traceback.TracebackException
    printed.__init__ = note_and_build
    atexit.register(failing.tell)


def send(event: dict[str, Any]) -> None:
    """Append `event` in a single write, so that lines of different processes do not mix."""
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
    """The module `name` beside this file, loaded without its package."""
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
    """The text of an exception, shortened; empty if it has none."""
    try:
        return str(error)[:_MOST_TEXT]
    except Exception:  # noqa: BLE001 - the program's own __str__ failed
        return ""


def uses_cuda() -> bool:
    """True once this process uses the device."""
    torch = sys.modules.get("torch")
    try:
        return bool(torch is not None and torch.cuda.is_initialized())
    except AttributeError:  # torch is still being imported
        return False
