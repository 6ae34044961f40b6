"""Removes the files and the shared memory that the processes of a run leave behind.

Programs on a device are ended early, so they can't remove their temporary files and their shared
memory (/dev/shm). A run gets its own folder for temporary files. Shared memory is removed only if
the run was observed to create it: other runs have theirs in the same place.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import math
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tuner.core.errors import UnavailableError
from tuner.core.files import owned_folder
from tuner.core.processes import descendants

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where shm_open(3) and sem_open(3) make entries

_LOOK_EVERY_S = 0.2
_FOLDER = "t"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"

_IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x40, 0x80, 0x100, 0x200  # inotify(7)
_APPEARS, _GOES = _IN_CREATE | _IN_MOVED_TO, _IN_DELETE | _IN_MOVED_FROM
_EVENT = struct.Struct("iIII")
_EVENTS_BYTES = 64 * 1024
_LIBC = ctypes.CDLL(None, use_errno=True)

_WITH_PID = re.compile(r"(?:torch_|__KMP_REGISTERED_LIB_)(\d+)_")
"""Names by PyTorch and OpenMP that contain the id of the process that made them."""


class Leftovers:
    """The leftovers of the descendants of process `root`. Made by `leftovers`.

    `environment` has the variables by which they use their folder. `look` is to be called when
    `descriptor` can be read, and within `look_within_s`. A process that is forked closes `foreign`.
    """

    def __init__(self, environment: Mapping[str, str], root: int, foreign: tuple[int, ...]) -> None:
        self.environment = environment
        self._root = root
        self._pids: set[int] = set()
        self._own: set[str] = set()
        self._new: set[str] = set()
        self._looked_s = 0.0
        self.descriptor = _watched(SHARED_MEMORY)
        self.foreign = (*foreign, *([] if self.descriptor is None else [self.descriptor]))

    @property
    def look_within_s(self) -> float:
        """Seconds after which it is to be looked again: makers of new entries may end."""
        return _LOOK_EVERY_S if self._new else math.inf

    def look(self, *, now: bool = False) -> None:
        """See what was made since the last call, and who made it."""
        self._read()
        if not now and time.monotonic() < self._looked_s + _LOOK_EVERY_S:
            return
        pids = descendants(self._root)
        self._pids.update(pids)
        unnamed = {name for name in self._new if _WITH_PID.match(name) is None}
        self._own.update(name for name in self._new - unnamed if self._names_own(name))
        if unnamed:
            self._own |= unnamed & _held(pids)
        self._new.clear()
        self._looked_s = time.monotonic()

    def remove(self) -> None:
        """Remove the shared memory. To be called once the processes have ended."""
        self.look()
        if self.descriptor is not None:
            os.close(self.descriptor)
        with contextlib.suppress(OSError):
            names = [path.name for path in SHARED_MEMORY.iterdir()]
            self._own.update(name for name in names if self._names_own(name))
        for name in self._own:
            path = SHARED_MEMORY / name
            with contextlib.suppress(OSError):  # gone meanwhile
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _names_own(self, name: str) -> bool:
        found = _WITH_PID.match(name)
        return found is not None and int(found[1]) in self._pids

    def _read(self) -> None:
        """Take note of names that have appeared, and of those that have gone."""
        for mask, name in _events(self.descriptor):
            if mask & _APPEARS:
                self._new.add(name)
            elif mask & _GOES:
                self._new.discard(name)
                self._own.discard(name)


@contextlib.contextmanager
def leftovers(root: int) -> Iterator[Leftovers]:
    """The leftovers of the descendants of process `root`, which are removed when the block ends.

    By then they must have ended. Where no folder can be made, as on a full disk, they have none of
    their own.
    """
    with contextlib.ExitStack() as stack:
        environment: dict[str, str] = {}
        foreign: tuple[int, ...] = ()
        with contextlib.suppress(OSError, UnavailableError):
            scratch, owned = stack.enter_context(owned_folder(for_ray=False))
            foreign = (owned,)
            folder = scratch / _FOLDER
            folder.mkdir()
            # What is compiled is kept for other runs, where PyTorch keeps it by itself.
            compiled = os.environ.get(_COMPILED) or _compiled_folder()
            environment = {"TMPDIR": str(folder), _COMPILED: compiled}
        found = Leftovers(environment, root, foreign)
        try:
            yield found
        finally:
            found.remove()


def _compiled_folder() -> str:
    """As PyTorch chooses it (`torch/_inductor/runtime/cache_dir_utils.py`)."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{user}")


def _watched(folder: Path) -> int | None:
    """A descriptor that tells what appears in a folder; None where nothing can."""
    descriptor = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        return None
    if _LIBC.inotify_add_watch(descriptor, os.fsencode(folder), _APPEARS | _GOES) < 0:
        os.close(descriptor)
        return None
    return int(descriptor)


def _events(descriptor: int | None) -> Iterator[tuple[int, str]]:
    """The pending events as (mask, name), see inotify(7)."""
    if descriptor is None:
        return
    while True:
        try:
            data = os.read(descriptor, _EVENTS_BYTES)
        except BlockingIOError:
            return
        at = 0
        while at < len(data):
            _, mask, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            yield mask, os.fsdecode(data[at : at + length].rstrip(b"\0"))
            at += length


def _held(pids: list[int]) -> set[str]:
    """The entries of shared memory that these processes have open or mapped."""
    places: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            places.update(_mapped(pid))
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    places.add(str(link.readlink()))
    start = f"{SHARED_MEMORY}/"
    return {place.removeprefix(start).split("/")[0] for place in places if place.startswith(start)}


def _mapped(pid: int) -> Iterator[str]:
    with Path(f"/proc/{pid}/maps").open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            if str(SHARED_MEMORY) in line:
                yield line.split(maxsplit=5)[5].removesuffix("\n")
