"""Processes on Linux: who ends whom, and what is left.

A signal is sent only to a process whose id cannot mean another one by then: a child that was
not reaped yet, or a process that is held by a file descriptor (pidfd) and carries the mark of
the runner that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1  # prctl(2), sys/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)

GRACE_S = 0.25
"""What helpers of a process that has ended get to clean up, before they are killed."""

_PAUSE_S = 0.002

_UNIFIED = Path("/sys/fs/cgroup")
_VERSION_1 = Path("/sys/fs/cgroup/memory")


def become_subreaper() -> None:
    """From now on, descendants whose parent ends become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Have this process killed when `parent`, which forked it, ends; at once, if it has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def has_ended(child: int) -> bool:
    """Whether a child has ended. It stays unreaped, so that its id still means it."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_child(child: int, *, deadline_s: float) -> int | None:
    """End a child that leads a process group, and its group; returns its exit code.

    The code is as in `subprocess`. None when it did not end within `deadline_s`, as a process
    that waits for a device driver may. Must be called by a subreaper with no other child.
    """
    until = time.monotonic() + deadline_s
    if not has_ended(child):
        os.kill(child, signal.SIGKILL)
    while not has_ended(child):
        if time.monotonic() > until:
            return None
        time.sleep(_PAUSE_S)
    # Helpers that clean up after their process, such as Python's tracker of shared memory,
    # notice its end at once.
    grace_until = min(until, time.monotonic() + GRACE_S)
    while own_children() != [child] and time.monotonic() < grace_until:
        time.sleep(_PAUSE_S)
    # Unreaped, the child still holds the number of its group.
    with contextlib.suppress(ProcessLookupError):  # it ended before it led one
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def end_children(*, deadline_s: float) -> tuple[int, ...]:
    """End and reap all children of this process, and those that it inherits meanwhile.

    Returns the ids of those that did not end within `deadline_s`.
    """
    until = time.monotonic() + deadline_s
    while _reap():
        children = own_children()
        if time.monotonic() > until:
            return tuple(children)
        for child in children:
            os.kill(child, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return ()


def _reap() -> bool:
    """Reap children that have ended; returns whether there are others."""
    while True:
        try:
            child, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if child == 0:
            return True


def own_children() -> list[int]:
    """Children of this process, which has one thread."""
    try:
        # Quicker than psutil, which reads every process, and not in every kernel (proc(5),
        # CONFIG_PROC_CHILDREN).
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except FileNotFoundError:
        return [child.pid for child in psutil.Process().children()]
    return [int(pid) for pid in listed.split()]


def end_marked(mark: str, *, deadline_s: float) -> tuple[int, ...]:
    """End every process that was started with `mark` ("NAME=value") in its environment.

    For what outlives the process that should have ended it. Returns the ids of those that did
    not end within `deadline_s`.
    """
    until = time.monotonic() + deadline_s
    while found := marked(mark):
        if time.monotonic() > until:
            return tuple(found)
        for pid in found:
            _end_if_marked(pid, mark)
        time.sleep(_PAUSE_S)
    return ()


def marked(mark: str) -> list[int]:
    """Ids of living processes of this user that were started with `mark` in their environment."""
    return [pid for pid in psutil.pids() if pid != os.getpid() and _has_mark(pid, mark)]


def _end_if_marked(pid: int, mark: str) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # Looked at again, because the id may have passed on before it was held. psutil only
        # compares when processes began, and does not hold them.
        if _has_mark(pid, mark):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


def _has_mark(pid: int, mark: str) -> bool:
    """False for a process that has ended: it has no environment left."""
    name, _, value = mark.partition("=")
    try:
        return bool(psutil.Process(pid).environ().get(name) == value)
    except psutil.Error:  # of another user's, too
        return False


def oom_kills() -> int | None:
    """How many processes the kernel has killed here for want of memory, since the machine began.

    "Here" is the control group of this process, whichever limit it was that was reached; None
    where it has none that counts. Sources: kernel documentation, cgroup-v2 (memory.events) and
    cgroup-v1 (memory.oom_control).
    """
    for path in _counters():
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def oom_kills_since(before: int | None) -> int | None:
    """How many more than `before`, an earlier `oom_kills`; None where either is not known."""
    now = oom_kills()
    return None if now is None or before is None else now - before


def _counters() -> Iterator[Path]:
    """Where the counter may be.

    In a container the group's own path may lie outside what is mounted, whose root is then the
    group.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _VERSION_1 / path.lstrip("/") / "memory.oom_control"
            yield _VERSION_1 / "memory.oom_control"
        elif number == "0" and not controllers:
            yield _UNIFIED / path.lstrip("/") / "memory.events"
            yield _UNIFIED / "memory.events"
