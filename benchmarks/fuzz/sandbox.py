"""One input at a time, watched: what it wrote, started or opened, how long it took.

Python's audit hooks (PEP 578) see every file that is opened for writing and every process or
connection that is started, wherever in the program; a limit on the address space bounds memory.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.fuzz.targets import Target

CPU_LIMIT_S = 10
"""Processor time of one input, which does not depend on what else the machine does."""
MEMORY_BYTES = 2**30
"""Address space that an input may add to what the libraries have taken."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = (
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate",
    "os.chmod", "os.utime", "shutil.rmtree", "subprocess.Popen", "os.system", "os.exec",
    "os.posix_spawn", "os.fork", "socket.connect", "socket.bind", "ctypes.dlopen",
    "pickle.find_class",
)  # fmt: skip


class TookTooLongError(BaseException):
    """No `except Exception` on the way may keep it."""


class Sandbox:
    """A folder with one input in it, and a watch over everything that leaves it."""

    def __init__(self, folder: Path, target: Target) -> None:
        self.target = target
        self.path = folder / target.file
        self.inputs = 0
        self.answers = 0
        self._scratch = str(folder / "scratch")
        self._watching = False
        self._seen: list[str] = []
        (folder / "scratch").mkdir()
        for name in ("evil.py", "configuration_evil.py", "train.py"):
            (folder / name).write_text("raise SystemExit('code of the input was run')\n")
        os.chdir(folder)
        os.environ["HOME"] = str(folder)
        sys.addaudithook(self._audit)
        signal.signal(signal.SIGPROF, _too_long)

    def run(self, data: bytes) -> None:
        """Read `data`. Raises AssertionError where it did anything but answer."""
        from tuner.core.errors import TunerError

        self.inputs += 1
        self.path.write_bytes(data)
        self._seen.clear()
        with self._limited():
            try:
                self.target.check(self.path)
            except TunerError as error:
                self.answers += 1
                text = str(error)
                assert text.strip(), "an error without a text"
                assert len(text) < 100_000, f"an error of {len(text)} characters"
        assert not self._seen, f"it did {self._seen[0]}"
        assert self.path.read_bytes() == data, "it changed the input"

    @contextmanager
    def _limited(self) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        self._watching = True
        try:
            yield
        finally:
            self._watching = False
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        if event == "open":
            path, _, flags = arguments
            if not flags & _WRITES or str(path).startswith(self._scratch) or path == os.devnull:
                return
            self._seen.append(f"open {path!r} for writing")
        elif event in _CHANGES and not self._is_allowed(arguments[0]):
            self._seen.append(f"{event} {arguments!r:.200}")

    def _is_allowed(self, subject: Any) -> bool:
        # A descriptor was opened before, which was seen.
        return isinstance(subject, int) or str(subject).startswith(self._scratch)


def limit_memory() -> None:
    """From here on this process gets `MEMORY_BYTES` more, and no core files."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def place_of(error: BaseException) -> str:
    """Exception and the innermost line of this project: what makes two failures one."""
    name = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/tuner/" in f.filename or "/benchmarks/accuracy" in f.filename]
    if not own:
        return f"{name}: {str(error)[:80]}"
    return f"{name} at {'/'.join(Path(own[-1].filename).parts[-3:])}:{own[-1].lineno}"


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TookTooLongError(f"more than {CPU_LIMIT_S} s of processor time")
