"""Keeps what a program does inside its process: files, other processes, sockets and signals.

It protects your files from a program's ordinary lines, and is no sandbox against a hostile one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tuner.program.standins import files
from tuner.program.standins.files import DEVICES, WRITES, Layer, Refused
from tuner.program.standins.unknown import is_library, users_frame, where

PLACEHOLDER = "placeholder-for-a-secret"
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_?KEY(_ID)?)$", re.IGNORECASE)
_DROPPED = (
    "killpg setpriority sched_setaffinity sched_setscheduler sched_setparam setns unshare"
    " pidfd_open"
)
"""Functions that change other processes, or can."""
_REFUSED = frozenset(
    "os.remove os.rmdir os.mkdir os.chmod os.chown os.chflags os.utime os.truncate os.setxattr"
    " os.removexattr os.rename os.link os.symlink os.system os.exec os.fork os.forkpty"
    " os.posix_spawn os.spawn os.startfile os.startfile/2 os.killpg subprocess.Popen pty.spawn"
    " _winapi.CreateProcess _winapi.TerminateProcess _winapi.CopyFile2 winreg.CreateKey"
    " winreg.DeleteKey winreg.DeleteValue winreg.SaveKey winreg.LoadKey winreg.SetValue"
    " syslog.syslog socket.sethostname resource.prlimit sqlite3.enable_load_extension"
    " sqlite3.load_extension".split()
)
"""Events that Python tells of before they happen; those of files are not refused to `files`."""
_SOCKETS = frozenset(
    "socket.connect socket.bind socket.sendto socket.sendmsg socket.getaddrinfo"
    " socket.gethostbyname socket.gethostbyaddr socket.getnameinfo".split()
)
_NATIVE = frozenset(
    "pyarrow tokenizers safetensors h5py grpc zmq polars duckdb pycurl lmdb psycopg2 _cffi_backend"
    " fastparquet rocksdb lxml netCDF4 tables cv2 torch jaxlib tensorflow".split()
)
"""Libraries that write files or use sockets without Python being told of it."""
_FOREIGN = frozenset("ctypes.dlopen ctypes.dlsym ctypes.dlsym/handle ctypes.call_function".split())

leave = os._exit
"""Ends this process at once; the program's `os._exit` ends only the program."""

DROPPED: list[dict[str, Any]] = []
"""What did not happen, with its line; and the words of a command that did not start."""


def drop(what: str, command: Any = None) -> None:
    found: dict[str, Any] = {"what": what, "where": where(users_frame(1))}
    if command is not None:
        with contextlib.suppress(TypeError, ValueError):
            words = shlex.split(command) if isinstance(command, str) else map(os.fsdecode, command)
            found["words"] = [*words]
    if found not in DROPPED and len(DROPPED) < 100:
        DROPPED.append(found)


def install(request: Mapping[str, Any], unknown: Callable[[str], Any] | None = None) -> None:
    """From now on nothing that the program does happens outside of this process.

    `unknown` makes the output of a command that does not run.
    """
    layer = Layer(request["scratch"])
    sys.dont_write_bytecode = True
    absent: Any = dict.fromkeys(("_gdbm", "_dbm", "_posixshmem", "readline"))
    sys.modules.update(absent)  # they open files that Python is not told of
    _install_environment()
    _swap({**layer.install(request.get("files") or {}), **_processes()})
    patches: dict[str, Callable[[Any], None]] = {
        "subprocess": lambda module: _patch_subprocess(module, unknown),
        "multiprocessing": _patch_multiprocessing,
        "concurrent.futures.process": _patch_futures,
        "socket": lambda module: [
            setattr(module.socket, name, lambda *_: None)  # a port is given; nobody can reach it
            for name in ("bind", "listen")
            if os.name != "nt"  # whose socketpair needs them
        ],
        "sqlite3.dbapi2": lambda module: _patch_sqlite(module, layer),
        "shutil": lambda module: module.__dict__.update(_use_fd_functions=False, _winapi=None),
    }
    _patch_after_import(patches)
    _limit_memory(4 * (request.get("memory_bytes") or 2**31))
    sys.addaudithook(functools.partial(_hook, layer.scratch))


def _swap(swapped: Mapping[Any, Any]) -> None:
    """Replaces functions under every name that they have in a module but in this."""
    for module in [each for name, each in sys.modules.items() if name != __name__]:
        values = getattr(module, "__dict__", {})
        for name, value in list(values.items()):
            if callable(value) and type(value).__hash__ is not None:
                with contextlib.suppress(TypeError):
                    if value in swapped:
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


# -- processes -----------------------------------------------------------------------------------


def _processes() -> dict[Any, Callable[..., Any]]:
    kill_ = os.kill

    def system(command: Any) -> int:
        drop(f"os.system({command!r})", command)
        return 0

    def execv(path: Any, args: Any, *_: Any) -> None:
        drop(f"os.execv({path!r})", args)
        raise SystemExit(0)

    def end(code: int = 134) -> None:
        raise SystemExit(code)

    def kill(pid: int, number: int) -> None:
        if number == 0:
            return kill_(pid, 0)
        if pid == os.getpid():
            end(128 + number)
        return drop(f"os.kill({pid}, {int(number)})")

    new = {"system": system, "execv": execv, "execve": execv, "_exit": end, "abort": end}
    new |= {n: functools.partial(lambda n, *_: drop(f"os.{n}"), n) for n in _DROPPED.split()}
    found = {getattr(os, n): f for n, f in {**new, "kill": kill}.items() if hasattr(os, n)}
    with contextlib.suppress(ImportError):
        from _posixsubprocess import fork_exec

        found[fork_exec] = functools.partial(files.refuse, "a process")
    return found


def _patch_after_import(patches: Mapping[str, Callable[[Any], None]]) -> None:
    for name in patches.keys() & sys.modules.keys():
        patches[name](sys.modules[name])

    class After:
        """Patches a module of Python's as soon as it is imported."""

        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if name not in patches:
                return None
            spec = sys.modules["_frozen_importlib_external"].PathFinder.find_spec(name, path)
            if spec is not None and is_library(spec.origin or ""):
                run = spec.loader.exec_module
                spec.loader.exec_module = lambda module: (run(module), patches[name](module))
            return spec

    sys.meta_path.insert(0, After)


def _patch_subprocess(module: Any, unknown: Callable[[str], Any] | None) -> None:
    names = ("bufsize", "executable", "stdin", "stdout", "stderr")

    class Popen:
        """A process that does not run: it has ended well, and its output is unknown or empty."""

        returncode, pid = 0, 2**22 + 1  # no process has this number

        def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
            drop(f"subprocess: {args!r:.200}", args)
            self.args, options = args, {**dict(zip(names, rest)), **options}
            words = ("text", "universal_newlines", "encoding", "errors")
            stream: Any = io.StringIO if any(map(options.get, words)) else io.BytesIO
            for name in names[2:]:
                made = stream() if options.get(name) == module.PIPE else None
                if made and unknown and name == "stdout":
                    made = unknown(f"output of {args!r:.80}")
                setattr(self, name, made)

        def communicate(self, *_: Any, **__: Any) -> tuple[Any, Any]:
            out, err = self.stdout, self.stderr  # type: ignore[attr-defined]
            out = out.read() if isinstance(out, io.IOBase) else out
            return out, err and err.read()

        def wait(self, timeout: Any = None) -> int:
            return 0

        def kill(self, *_: Any) -> None:
            pass

        def __enter__(self) -> Popen:
            return self

        poll, terminate, send_signal, __exit__ = wait, kill, kill, kill
        __class_getitem__ = classmethod(lambda cls, _: cls)

    _swap({module.Popen: Popen})


def _patch_multiprocessing(module: Any) -> None:
    """Its processes are threads of this one."""
    import multiprocessing.context as contexts
    from multiprocessing import dummy

    class Process(dummy.Process):
        authkey, sentinel = b"", 0

        def __init__(self, *args: Any, daemon: Any = None, **given: Any) -> None:
            super().__init__(*args, **given)
            self.daemon = True

        def terminate(self) -> None:
            pass

        kill = close = terminate

    names = "Lock RLock Semaphore BoundedSemaphore Condition Event Barrier Queue JoinableQueue"
    new = {name: getattr(dummy, name) for name in f"{names} Manager Pipe Pool Array Value".split()}
    new["Process"] = Process
    for kind in vars(contexts).values():
        if isinstance(kind, type) and issubclass(kind, contexts.BaseContext):
            for name, value in new.items():
                setattr(kind, name, staticmethod(value))
    vars(module).update(new)


def _patch_futures(module: Any) -> None:
    from concurrent.futures.thread import ThreadPoolExecutor

    def pool(n: Any = None, mp_context: Any = None, *args: Any, **given: Any) -> Any:
        given = {name: given[name] for name in given if name != "max_tasks_per_child"}
        return ThreadPoolExecutor(given.pop("max_workers", n), "", *args, **given)

    module.ProcessPoolExecutor = pool


def _patch_sqlite(module: Any, layer: Layer) -> None:
    connect = module.connect

    def guarded(database: Any, *args: Any, **given: Any) -> Any:
        if database not in ("", ":memory:") and not given.get("uri"):
            os.close(os.open(database, os.O_RDWR | os.O_CREAT, 0o644))
            database = layer.find(database)[1]
        made = connect(database, *args, **given)
        # ATTACH opens files that Python is not told of.
        made.set_authorizer(lambda action, *_: int(action == module.SQLITE_ATTACH))
        return made

    _swap({connect: guarded})


def _hook(scratch: str, event: str, args: tuple[Any, ...]) -> None:
    """What reaches the system all the same is refused: Python tells of it before it happens."""
    if event == "open":
        path, mode, flags = args
        is_written = flags & WRITES if isinstance(flags, int) else {*mode} & {*"wax+"}
        is_kept = not is_written or isinstance(path, int) or os.fsdecode(path) in DEVICES
        if not is_kept and sys._getframe(1).f_code.co_filename != files.__file__:
            raise Refused(f"open({path!r})")
    elif event == "sqlite3.connect":
        if args[0] not in ("", ":memory:") and not os.fsdecode(args[0]).startswith(scratch):
            raise Refused(f"{event}({args[0]!r})")
    elif event in _REFUSED or (event == "os.kill" and args[1]):
        is_descriptor = event == "os.truncate" and isinstance(args[0], int)
        if not is_descriptor and sys._getframe(1).f_code.co_filename != files.__file__:
            raise Refused(f"{event}({', '.join(map(repr, args[:1]))})")
    elif event in _SOCKETS:
        if "socketpair" not in sys._getframe(1).f_code.co_name:
            drop(event)
            raise OSError(errno.ENETUNREACH, "no network here")
    elif event in _FOREIGN:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__") == "ctypes":
            frame = frame.f_back
        if not is_library(frame.f_code.co_filename):
            raise Refused(f"{event}({args[0]!r})")
    elif event == "import" and args[1]:
        root = args[0].partition(".")[0]
        if not is_library(os.path.abspath(args[1])):
            raise Refused(f"the compiled extension {args[0]}")
        if root in _NATIVE:
            raise ImportError(f"{root} is not loaded when a program is only read", name=root)


# -- limits --------------------------------------------------------------------------------------


def _limit_memory(memory_bytes: int) -> None:
    """Limits what is asked for, which a program may never touch; `watch` limits what is used."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def watch(seconds: float, memory_bytes: int, finish: Callable[[str, Any], object]) -> None:
    """Calls `finish` with "time" or "memory" and the line, when one of them is over."""
    end = time.monotonic() + seconds

    def look() -> None:
        while time.monotonic() < end and _peak_bytes() < memory_bytes:
            time.sleep(0.05)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = frame.f_back
        finish("time" if time.monotonic() >= end else "memory", frame and where(frame))

    threading.Thread(target=look, daemon=True).start()


def _peak_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)
