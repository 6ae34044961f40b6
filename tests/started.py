"""Python and `tuner` in processes of their own; none outlives its test."""

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

_STARTED: list[subprocess.Popen[str]] = []


def start(*arguments: str) -> subprocess.Popen[str]:
    """A command in a session of its own, with pipes for its output."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "tuner", *arguments]
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    _STARTED.append(process)
    return process


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """What this Python printed, and how it ended."""
    options = {"capture_output": True, "text": True, **options}
    check = options.pop("check", False)
    return subprocess.run([sys.executable, *map(str, arguments)], check=check, **options)


def end_all() -> None:
    """End what a test that failed has left."""
    while _STARTED:
        process = _STARTED.pop()
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
