"""Waits for what comes in a moment, on a machine that others use too, and for processes to end."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

LONG_S = 300.0


def wait_for(condition: Callable[[], object], within_s: float = LONG_S) -> None:
    """Look again and again until it is so."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """The letter of a process's state; none is left of what was reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """Whether it has not ended; where nobody reaps orphans, they stay as zombies."""
    return state_of(pid) not in ("", "Z", "X")


def wait_until_gone(pids: Iterable[int]) -> None:
    """All of them have ended, or do soon."""
    left = list(pids)
    wait_for(lambda: not any(map(is_alive, left)))
