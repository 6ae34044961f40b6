"""Keeps what a program does inside its process: files, other processes, sockets and signals.

It protects your files from a program's ordinary lines, and is no sandbox against a hostile one.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from typing import Any

from tuner.program.standins import NAMES, PLACEHOLDER, files
from tuner.program.standins.files import DEVICES, WRITES, Layer, Refused
from tuner.program.standins.unknown import is_library, users_frame, where

_posixsubprocess: Any = None
resource: Any = None
with contextlib.suppress(ImportError):  # Windows
    import _posixsubprocess
    import resource

_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_?KEY(_ID)?)$", re.IGNORECASE)
_DROPPED = (
    "killpg setpriority sched_setaffinity sched_setscheduler setns unshare pidfd_open".split()
)
_UNKNOWN: list[Callable[[str], Any]] = []

leave = os._exit
"""Ends this process at once; the program's `os._exit` ends only the program."""

DROPPED: list[dict[str, Any]] = []
"""Actions that did not happen, with their lines; and the words of commands not started."""


def drop(what: str, command: Any = None) -> int:
    found: dict[str, Any] = {"what": what, "where": where(users_frame(1))}
    if command is not None:
        with contextlib.suppress(TypeError, ValueError):
            words = shlex.split(command) if isinstance(command, str) else map(os.fsdecode, command)
            found["words"] = [*words]
    if found not in DROPPED and len(DROPPED) < 100:
        DROPPED.append(found)
    return 0


def install(request: Mapping[str, Any], unknown: Callable[[str], Any] | None = None) -> None:
    """From now on nothing that the program does happens outside of this process.

    `unknown` makes the output of a command that does not run.
    """
    sys.dont_write_bytecode = True
    absent: Any = dict.fromkeys(("_gdbm", "_dbm", "_posixshmem", "readline"))
    sys.modules.update(absent)  # they open files that Python is not told of
    _UNKNOWN[:] = [unknown] if unknown else []
    _install_environment()
    _swap(Layer(request["scratch"]).install(request.get("files") or {}) | _processes())
    for name in PATCHES.keys() & sys.modules.keys():
        PATCHES[name](sys.modules[name])
    sys.meta_path.insert(0, _After)
    if resource:  # a program may never touch what it asks for; `watch` limits what is used
        most = 4 * (request.get("memory_bytes") or 2**31)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    sys.addaudithook(_hook)


def _swap(swapped: Mapping[Any, Any]) -> None:
    """Replaces functions under every name that they have in a module but in this."""
    for module in [each for name, each in sys.modules.items() if name != __name__]:
        values = getattr(module, "__dict__", {})
        for name, value in list(values.items()):
            with contextlib.suppress(TypeError):  # it has no hash
                if callable(value) and value in swapped:
                    values[name] = swapped[value]


def _install_environment() -> None:
    """A token that is asked for by its name is there, also where you have none."""
    kind: Any = type(os.environ)
    get = kind.__getitem__

    def guarded(self: Any, name: Any) -> Any:
        try:
            return get(self, name)
        except KeyError:
            asks = sys._getframe(1).f_globals.get("__name__")
            if asks in ("os", "collections.abc", "_collections_abc") or not _SECRET.search(name):
                raise
            return PLACEHOLDER

    kind.__getitem__ = guarded


# -- processes ------------------------------------------------------------------------------------


def _end(code: int = 134) -> None:
    raise SystemExit(code)


def _fork_exec(*_: Any) -> None:
    raise Refused("a process")


def _processes() -> dict[Any, Callable[..., Any]]:
    new: dict[str, Any] = {n: lambda *_, name=n: drop(f"os.{name}") for n in _DROPPED}
    new["system"] = lambda command: drop(f"os.system({command!r})", command)
    new["execv"] = lambda path, args, *_: _end(drop(f"os.execv({path!r})", args))
    new["kill"] = lambda pid, number: (
        _end(128 + number) if number and pid == os.getpid() else drop(f"os.kill({pid}, {number})")
    )
    new |= {"execve": new["execv"], "_exit": _end, "abort": _end}
    found = {getattr(os, n): f for n, f in new.items() if hasattr(os, n)}
    return found | {getattr(_posixsubprocess, "fork_exec", None): _fork_exec}


class _After:
    """Patches a module of Python's as soon as it is imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        spec = name in PATCHES and PathFinder.find_spec(name, path)
        if spec and spec.loader and is_library(spec.origin or ""):
            run = spec.loader.exec_module
            exec_module: Any = lambda module: (run(module), PATCHES[name](module))  # noqa: E731
            vars(spec.loader)["exec_module"] = exec_module
        return spec or None


class _Popen:
    """A process that does not run: it has ended well, and its output is unknown or empty."""

    returncode, pid = 0, 2**22 + 1  # no process has this number

    def __init__(
        self, args: Any, _: Any = 0, __: Any = None,
        stdin: Any = None, stdout: Any = None, stderr: Any = None, *rest: Any, **options: Any,
    ) -> None:  # fmt: skip
        drop(f"subprocess: {args!r:.200}", args)
        is_text = any(map(options.get, ("text", "universal_newlines", "encoding", "errors")))
        made = [(io.StringIO if is_text else io.BytesIO)() for _ in range(3)]
        made[1] = _UNKNOWN[0](f"output of {args!r:.80}") if stdout == -1 and _UNKNOWN else made[1]
        given, self.args = (stdin, stdout, stderr), args
        self.stdin, self.stdout, self.stderr = (m if g == -1 else None for m, g in zip(made, given))

    def communicate(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        out, err = self.stdout, self.stderr
        return out.read() if isinstance(out, io.IOBase) else out, err and err.read()

    def __enter__(self) -> _Popen:
        return self

    wait = poll = terminate = kill = send_signal = __exit__ = lambda *_, **__: 0
    __class_getitem__ = classmethod(lambda cls, _: cls)


def _patch_multiprocessing(module: Any) -> None:
    """Its processes are threads of this one."""
    from multiprocessing import dummy

    class Process(dummy.Process):
        authkey, sentinel = b"", 0
        daemon: Any = property(lambda self: True, lambda self, value: None)
        terminate = kill = close = lambda self: None

        def __init__(self, *args: Any, daemon: Any = None, **given: Any) -> None:
            super().__init__(*args, **given)

    names = "Lock RLock Semaphore BoundedSemaphore Condition Event Barrier Queue JoinableQueue"
    new = {name: getattr(dummy, name) for name in f"{names} Manager Pipe Pool Array Value".split()}
    vars(module).update(new, Process=Process, get_context=lambda *_: module)


def _patch_futures(module: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    class ProcessPoolExecutor(ThreadPoolExecutor):
        def __init__(self, n: Any = None, mp_context: Any = None, *args: Any, **given: Any) -> None:
            super().__init__(given.pop("max_workers", n), "", *args, **given)

    module.ProcessPoolExecutor = ProcessPoolExecutor


def _patch_socket(module: Any) -> None:
    """Lets a program bind a port, which is out of reach for others."""
    if os.name != "nt":  # whose socketpair needs them
        module.socket.bind = module.socket.listen = lambda *_: None


def _patch_shutil(module: Any) -> None:
    """Finds the driver's command, as on a machine that has the GPU."""
    find = module.which

    def which(cmd: Any, *args: Any, **how: Any) -> Any:
        is_driver = cmd == "nvidia-smi"
        return find(cmd, *args, **how) or ("/usr/bin/nvidia-smi" if is_driver else None)

    vars(module).update(which=which, _use_fd_functions=False, _winapi=None)


PATCHES: dict[str, Callable[[Any], None]] = {
    "subprocess": lambda module: _swap({module.Popen: _Popen}),
    "multiprocessing": _patch_multiprocessing,
    "concurrent.futures.process": _patch_futures,
    "socket": _patch_socket,
    "shutil": _patch_shutil,
}


def _hook(event: str, args: tuple[Any, ...]) -> None:
    """Refuse what reaches the system all the same: Python tells of it before it happens."""
    if event == "open":
        path, mode, flags = args
        is_written = flags & WRITES if isinstance(flags, int) else {*mode} & {*"wax+"}
        is_kept = not is_written or isinstance(path, int) or os.fsdecode(path) in DEVICES
        if not is_kept and sys._getframe(1).f_code.co_filename != files.__file__:
            raise Refused(f"open({path!r})")
    elif event in NAMES["refused"] or (event == "os.kill" and args[1]):
        is_descriptor = event == "os.truncate" and isinstance(args[0], int)
        if not is_descriptor and sys._getframe(1).f_code.co_filename != files.__file__:
            raise Refused(f"{event}({', '.join(map(repr, args[:1]))})")
    elif event in NAMES["sockets"] and "socketpair" not in sys._getframe(1).f_code.co_name:
        drop(event)
        raise OSError(errno.ENETUNREACH, "no network here")
    elif event.startswith(("ctypes.dl", "ctypes.call")):
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__") == "ctypes":
            frame = frame.f_back
        if not is_library(frame.f_code.co_filename):
            raise Refused(f"{event}({args[0]!r})")
    elif event == "import" and args[1]:
        root = args[0].partition(".")[0]
        if not is_library(os.path.abspath(args[1])):
            raise Refused(f"the compiled extension {args[0]}")
        if root in NAMES["native"]:
            raise ImportError(f"{root} is not loaded when a program is only read", name=root)


def watch(seconds: float, memory_bytes: int, finish: Callable[[str, Any], object]) -> None:
    """Calls `finish` with "time" or "memory" and the line, when one of them is over."""
    end, is_linux = time.monotonic() + seconds, sys.platform == "linux"
    state = os.open("/proc/self/statm", os.O_RDONLY) if is_linux else -1

    def used() -> int:
        if is_linux:  # where ru_maxrss begins with that of the process that started this one
            return int(os.pread(state, 99, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if resource else 0

    def look() -> None:
        while time.monotonic() < end and used() < memory_bytes:
            time.sleep(0.05)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = frame.f_back
        finish("time" if time.monotonic() >= end else "memory", frame and where(frame))

    threading.Thread(target=look, daemon=True).start()


class TooLong(BaseException):
    """Ends a part of a program that takes long."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises `TooLong` in this thread if the lines inside are not done by then."""
    import ctypes

    what = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(TooLong)
    late = threading.Timer(seconds, ctypes.pythonapi.PyThreadState_SetAsyncExc, what)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
