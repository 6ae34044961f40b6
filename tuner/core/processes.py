"""Finds, signals and ends processes on Linux.

A signal is sent only to a process whose id can't have been reused: a child that was not reaped
yet, or a process that is held by a file descriptor (pidfd) and carries the mark of the runner
that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # prctl(2), sys/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)

GRACE_S = 0.25
"""Helpers of an ended process have this long to clean up before they are killed."""

_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""Parts of the command lines of helpers that remove shared memory when all its users have ended:
Python's and PyTorch's. The users may be helpers too, as workers of a data loader are."""

_PAUSE_S = 0.002
_CHUNK_BYTES = 64 * 1024

_UNIFIED = Path("/sys/fs/cgroup")
_VERSION_1 = Path("/sys/fs/cgroup/memory")


def become_subreaper() -> None:
    """From now on, descendants whose parent ends become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Have this process killed when `parent`, which forked it, ends; at once, if it has.

    It writes no core file, which can have gigabytes.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def end_like(exit_code: int) -> NoReturn:
    """End this process as another one has ended, by the same code or signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code < 0:
        faulthandler.disable()  # the stack of this process explains nothing
        with contextlib.suppress(OSError):  # SIGKILL has no handler to set back
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
        time.sleep(1)
    os._exit(exit_code if exit_code > 0 else 128 - exit_code)


def woken_by(*numbers: int) -> tuple[int, int]:
    """Both ends of a pipe that can be read once one of these signals has reached this process."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return woken, wake


def read_pipe(descriptor: int) -> bytes | None:
    """The data in a pipe that doesn't block; empty at its end, None if there is none yet."""
    try:
        return os.read(descriptor, _CHUNK_BYTES)
    except BlockingIOError:
        return None


def has_ended(child: int) -> bool:
    """True if a child has ended. It is not reaped, so its id can't be reused yet."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_child(child: int, *, deadline_s: float) -> int | None:
    """End a child and reap it; returns its exit code as in `subprocess`.

    None when it did not end within `deadline_s`, as a process that waits for a device driver may.
    """
    until = time.monotonic() + deadline_s
    if not has_ended(child):
        os.kill(child, signal.SIGKILL)
    while not has_ended(child):
        if time.monotonic() > until:
            return None
        time.sleep(_PAUSE_S)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def end_children(*, deadline_s: float) -> tuple[int, ...]:
    """End and reap all children of this process, and those that it inherits meanwhile.

    Must be called by a subreaper with one thread. Helpers get `GRACE_S` to end by themselves; then
    those that remove shared memory of others (`_CLEANERS`) get as long again, after the processes
    whose end they wait for. Returns the ids of those that did not end within `deadline_s`.
    """
    began = time.monotonic()
    while _reap():
        children = _children(os.getpid(), [os.getpid()])
        waited_s = time.monotonic() - began
        if waited_s > deadline_s:
            return tuple(children)
        for child in children:
            if waited_s > 2 * GRACE_S or (waited_s > GRACE_S and not _is_cleaner(child)):
                os.kill(child, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return ()


def _is_cleaner(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False
    return any(name in command for name in _CLEANERS)


def _reap() -> bool:
    """Reap children that have ended; returns whether there are others."""
    while True:
        try:
            child, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if child == 0:
            return True


def descendants(root: int) -> list[int]:
    """Ids of all processes that descend from `root`, itself left out."""
    found: list[int] = []
    pending = [root]
    while pending:
        pid = pending.pop()
        try:
            threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
        except OSError:  # it has ended
            continue
        children = _children(pid, threads)
        found += children
        pending += children
    return found


def _children(pid: int, threads: Iterable[int]) -> list[int]:
    """The children that these threads of a process have started or inherited."""
    found: list[int] = []
    for thread in threads:
        try:
            # Quicker than psutil, which reads every process, and not in every kernel (proc(5),
            # CONFIG_PROC_CHILDREN).
            listed = Path(f"/proc/{pid}/task/{thread}/children").read_text()
        except FileNotFoundError:
            if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
                return _children_of(pid)
        except ProcessLookupError:
            continue
        else:
            found += map(int, listed.split())
    return found


def _children_of(pid: int) -> list[int]:
    import psutil  # a prediction needs none, and an emulated program may have none

    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def processor_s(root: int) -> float:
    """Processor time in seconds that a process and its descendants have used (proc(5))."""
    ticks = 0
    for pid in (root, *descendants(root)):
        with contextlib.suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def native_threads() -> tuple[str, ...]:
    """The names of this process's threads that Python did not start (proc(5))."""
    python = {thread.native_id for thread in threading.enumerate()}
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if int(task.name) not in python:
                names.append((task / "comm").read_text().strip())
    return tuple(sorted(names))


def tell(pid: int, number: int, *, below: int) -> bool:
    """Send a signal to a descendant of process `below` that has a handler for it.

    Returns whether it was sent.
    """
    return _signal_if(pid, number, lambda: pid in descendants(below) and handles(pid, number))


def _signal_if(pid: int, number: int, is_right: Callable[[], bool]) -> bool:
    """Send a signal to a process that `is_right` while it is held; returns whether it was sent.

    Before it is held, its id may have passed on to another process. psutil only compares when
    processes began, and does not hold them.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not is_right():
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def handles(pid: int, number: int) -> bool:
    """True if a process still runs and has a handler for a signal (proc(5))."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it is reaped
        return False
    known = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    if known["State"][0] in "ZX":
        return False
    return bool(int(known["SigCgt"][0], 16) >> (number - 1) & 1)


def end_marked(mark: str, *, deadline_s: float) -> tuple[int, ...]:
    """End every process that was started with `mark` ("NAME=value") in its environment.

    For processes that outlive the one that should have ended them. Returns the ids of those that
    did not end within `deadline_s`.
    """
    until = time.monotonic() + deadline_s
    while found := marked(mark):
        if time.monotonic() > until:
            return tuple(found)
        for pid in found:
            _signal_if(pid, signal.SIGKILL, functools.partial(_has_mark, pid, mark))
        time.sleep(_PAUSE_S)
    return ()


def marked(mark: str) -> list[int]:
    """Ids of living processes of this user that were started with `mark` in their environment."""
    import psutil

    return [pid for pid in psutil.pids() if pid != os.getpid() and _has_mark(pid, mark)]


def _has_mark(pid: int, mark: str) -> bool:
    """False for a process that has ended: it has no environment left."""
    name, _, value = mark.partition("=")
    import psutil

    try:
        return bool(psutil.Process(pid).environ().get(name) == value)
    except psutil.Error:  # of another user's, too
        return False


def oom_kills() -> int | None:
    """Processes of this control group that the kernel has killed for lack of memory since boot.

    It does not matter which limit was reached. None if the control group has no such counter.
    Sources: kernel documentation, cgroup-v2 (memory.events) and cgroup-v1 (memory.oom_control).
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
    """The increase since `before`, an earlier `oom_kills()`; None if either is unknown."""
    now = oom_kills()
    return None if now is None or before is None else now - before


def _counters() -> Iterator[Path]:
    """The possible paths of the counter.

    In a container the group's own path may lie outside the mounted tree. The root of that tree is
    then the group.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _VERSION_1 / path.lstrip("/") / "memory.oom_control"
            yield _VERSION_1 / "memory.oom_control"
        elif number == "0" and not controllers:
            yield _UNIFIED / path.lstrip("/") / "memory.events"
            yield _UNIFIED / "memory.events"
