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
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tuner.program.standins import files
from tuner.program.standins.files import DEVICES, WRITES, Layer, Refused
from tuner.program.standins.unknown import is_library, users_frame, where

PLACEHOLDER = "placeholder-for-a-secret"
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_?KEY(_ID)?)$", re.IGNORECASE)

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
    files.install(layer, request.get("files") or {}, _swap)
    _install_processes(layer, unknown)
    _limit_memory(4 * (request.get("memory_bytes") or 2**31))
    _install_net(layer)


def _swap(swapped: Mapping[Any, Any]) -> None:
    """Replaces functions under every name that they have in a module but in these."""
    for module in list(sys.modules.values()):
        values = getattr(module, "__dict__", {})
        if values.get("__name__") in (__name__, files.__name__):
            continue
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

_OF_OTHERS = (
    "killpg setpriority sched_setaffinity sched_setscheduler sched_setparam setns unshare"
    " pidfd_open"
)
"""Functions that change other processes, or can."""


def _install_processes(layer: Layer, unknown: Callable[[str], Any] | None) -> None:
    pending: list[int] = []
    kill_ = os.kill

    def started(what: str, command: Any = None) -> int:
        """The number of a process that does not start; no process has it."""
        drop(what, command)
        pending.append(2**22 + len(pending) + 1)
        return pending[-1]

    def wait(pid: int = -1, *_: Any) -> tuple[int, int]:
        if pid not in pending and (pid > 0 or not pending):
            raise ChildProcessError(errno.ECHILD, os.strerror(errno.ECHILD))
        pending.remove(pid if pid in pending else (pid := pending[0]))
        return pid, 0

    def kill(pid: int, number: int) -> None:
        import signal

        if number == 0:
            kill_(pid, 0)
        elif pid != os.getpid():
            drop(f"os.kill({pid}, {int(number)})")
        elif signal.getsignal(number) in (signal.SIG_DFL, None):
            raise SystemExit(128 + number)
        else:
            signal.raise_signal(number)

    def ended(code: Any = 0) -> NoReturn:
        raise SystemExit(code)

    def named(name: str) -> Callable[..., Any]:
        def call(*args: Any, **_: Any) -> Any:
            words = [arg for arg in args if isinstance(arg, str | bytes | list | tuple)]
            what = f"os.{name}({', '.join(map(repr, words[:1]))})"
            if name.startswith(("spawn", "posix_spawn", "fork")):
                pid = started(what)
                return 0 if name[0] == "s" and args[0] == os.P_WAIT else pid
            drop(what, words[-1] if words else None)
            if name.startswith("exec"):
                raise SystemExit(0)
            return 0 if name == "system" else None

        return call

    names = ["system", "fork", *_OF_OTHERS.split()]
    names += [n for n in dir(os) if n.startswith(("spawn", "posix_spawn", "exec"))]
    new: dict[str, Callable[..., Any]] = {name: named(name) for name in names}
    new.update(wait=wait, waitpid=wait, kill=kill, _exit=ended, abort=lambda: ended(134))
    _swap({getattr(os, name): new[name] for name in new if hasattr(os, name)})
    patches: dict[str, Callable[[Any], None]] = {
        "subprocess": lambda module: _patch_subprocess(module, started, unknown),
        "multiprocessing": _patch_multiprocessing,
        "concurrent.futures.process": _patch_futures,
        "socket": _patch_socket,
        "sqlite3.dbapi2": lambda module: _patch_sqlite(module, layer),
        "getpass": _patch_getpass,
        "shutil": lambda module: module.__dict__.update(_use_fd_functions=False, _winapi=None),
    }
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    with contextlib.suppress(ImportError):
        import _posixsubprocess

        def refuse(*_: Any) -> NoReturn:
            raise Refused("a process")

        _posixsubprocess.fork_exec = refuse

    class After:
        """Patches a module of Python's as soon as it is imported."""

        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            patch = patches.get(name)
            if patch is None:
                return None
            spec = sys.modules["_frozen_importlib_external"].PathFinder.find_spec(name, path)
            if spec is not None and is_library(spec.origin or ""):
                run = spec.loader.exec_module

                def exec_module(module: Any) -> None:
                    run(module)
                    patch(module)

                spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, After)


def _patch_subprocess(module: Any, started: Any, unknown: Callable[[str], Any] | None) -> None:
    names = ("bufsize", "executable", "stdin", "stdout", "stderr")

    class Popen:
        """A process that does not run: it has ended well, and its output is unknown or empty."""

        returncode = 0

        def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
            self.args, self.pid = args, started(f"subprocess: {args!r:.200}", args)
            options = {**dict(zip(names, rest)), **options}
            words = ("text", "universal_newlines", "encoding", "errors")
            stream: Any = io.StringIO if any(map(options.get, words)) else io.BytesIO
            for name in names[2:]:
                made = stream() if options.get(name) == module.PIPE else None
                if made and unknown and name == "stdout":
                    made = unknown(f"output of {args!r:.80}")
                setattr(self, name, made)

        def communicate(self, input: Any = None, timeout: Any = None) -> tuple[Any, Any]:  # noqa: A002
            out, err = self.stdout, self.stderr  # type: ignore[attr-defined]
            out = out.read() if isinstance(out, io.IOBase) else out
            return out, err and err.read()

        def wait(self, timeout: Any = None) -> int:
            return 0

        poll = wait

        def kill(self, *_: Any) -> None:
            pass

        terminate = send_signal = kill

        def __enter__(self) -> Popen:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def __class_getitem__(cls, _: object) -> Any:
            return cls

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

    class ProcessPoolExecutor(ThreadPoolExecutor):
        def __init__(
            self,
            max_workers: int | None = None,
            mp_context: Any = None,
            initializer: Any = None,
            initargs: Any = (),
            **_: Any,
        ) -> None:
            super().__init__(max_workers, "", initializer, initargs)

    module.ProcessPoolExecutor = ProcessPoolExecutor


def _patch_socket(module: Any) -> None:
    """A port is asked for and given; nobody can reach it."""
    bind = module.socket.bind

    def nothing(self: Any, *args: Any) -> None:
        if sys._getframe(1).f_code.co_filename == module.__file__:  # socketpair, on Windows
            bind(self, *args)

    module.socket.bind = nothing
    if os.name != "nt":
        module.socket.listen = nothing


def _patch_sqlite(module: Any, layer: Layer) -> None:
    connect = module.connect

    def guarded(database: Any, *args: Any, **given: Any) -> Any:
        text = os.fsdecode(database)
        if given.get("uri") and text.startswith("file:"):
            from urllib.parse import unquote, urlsplit

            text, given["uri"] = unquote(urlsplit(text).path), False
        if text not in ("", ":memory:"):
            descriptor = os.open(text, os.O_RDWR | os.O_CREAT, 0o644)
            text = layer.descriptors[descriptor][1]
            os.close(descriptor)
        made = connect(text, *args, **given)
        # ATTACH opens files that Python is not told of.
        made.set_authorizer(lambda action, *_: int(action == module.SQLITE_ATTACH))
        return made

    _swap({connect: guarded})


def _patch_getpass(module: Any) -> None:
    def end(*_: Any, **__: Any) -> NoReturn:
        raise EOFError("EOF when reading a line")

    module.getpass = end


# -- the net -------------------------------------------------------------------------------------

_PATHS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        "os.remove os.rmdir os.mkdir os.chmod os.chown os.chflags os.utime os.truncate os.setxattr"
        " os.removexattr".split(),
        (0,),
    ),
    **dict.fromkeys(("os.rename", "os.link"), (0, 1)),
    "os.symlink": (1,),
}
"""By the event that Python tells of: the arguments that are changed paths."""
_REFUSED = frozenset(
    "os.system os.exec os.fork os.forkpty os.posix_spawn os.spawn os.startfile os.startfile/2"
    " os.killpg subprocess.Popen pty.spawn _winapi.CreateProcess _winapi.TerminateProcess"
    " _winapi.CopyFile2 winreg.CreateKey winreg.DeleteKey winreg.DeleteValue winreg.SaveKey"
    " winreg.LoadKey winreg.SetValue syslog.syslog socket.sethostname resource.prlimit"
    " sqlite3.enable_load_extension sqlite3.load_extension".split()
)
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


def _install_net(layer: Layer) -> None:
    """What reaches the system all the same is refused: Python tells of it before it happens."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            if isinstance(path, int) or files.is_opening(path):
                return
            is_written = flags & WRITES if isinstance(flags, int) else {*mode} & {*"wax+"}
            if is_written and not layer.is_scratch(path) and os.fsdecode(path) not in DEVICES:
                raise Refused(f"open({path!r})")
        elif event == "sqlite3.connect":
            if args[0] not in ("", ":memory:") and not layer.is_scratch(args[0]):
                raise Refused(f"{event}({args[0]!r})")
        elif event in _PATHS:
            if not all(layer.is_scratch(args[number]) for number in _PATHS[event]):
                raise Refused(f"{event}({args[0]!r})")
        elif event in _REFUSED or (event == "os.kill" and args[1]):
            raise Refused(event)
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

    sys.addaudithook(hook)


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
