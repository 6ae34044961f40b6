"""Files of other people, read with limits, and temporary folders.

A temporary folder carries the lock of its process, so that the next process can remove what a
killed one left behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import platformdirs

from tuner.core.errors import InputError, UnavailableError


def shipped_places(packaged: str, in_source: str) -> list[Path]:
    """The paths of what comes with tuner: in the package, and in the source tree if it is one."""
    package = Path(__file__).resolve().parents[1]
    is_source = (package.parent / "pyproject.toml").is_file()  # and not site-packages
    return [package / packaged, *([package.parent / in_source] if is_source else [])]


def read_file(path: Path, max_bytes: int) -> bytes:
    """The bytes of the file at `path`.

    Raises `FileNotFoundError` where there is none, and `InputError` for one that cannot be read,
    for what is no file (a pipe would be waited for, a device has no end), and for one of more than
    `max_bytes`.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            # Its size may be none that the file system tells, or change.
            data = b"" if size > max_bytes else file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # a null byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"cannot read {str(path)!r}: {reason}") from error
    if size > max_bytes or len(data) > max_bytes:
        raise InputError(
            f"{str(path)!r} is larger than the {max_bytes >> 20} MiB that such a file may have"
        )
    return data


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """The file at `path`. Raises `InputError` for a pipe or a device, and `OSError` as `open`."""
    # A pipe without a writer is not waited for either.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InputError(f"{str(path)!r} is not a file")
        yield file


def user_cache() -> Path | None:
    """The user's folder for caches of this program; None without a home directory."""
    try:
        return platformdirs.user_cache_path("tuner", appauthor=False)
    except RuntimeError:  # as in some containers
        return None


PREFIX = "tuner-"

OWNER = "owner.lock"

RAY_FOLDER = "ray"

SOCKET_ROOM = 60
"""Ray appends about 60 characters for its sockets, and a socket path ends at 107 (unix(7))."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder with a path short enough for Ray's sockets, removed on leaving.

    Those of processes that were killed are removed first. Raises `UnavailableError` where none can
    be made.
    """
    with owned_folder() as (folder, _):
        yield folder


@contextlib.contextmanager
def owned_folder(*, for_ray: bool = True) -> Iterator[tuple[Path, int]]:
    """A scratch folder and the descriptor of its lock, which a forked process closes.

    If it is not `for_ray`, it lies where TMPDIR says, however long its path is.
    """
    try:
        parent = Path(tempfile.gettempdir())
        if for_ray and len(f"{parent}/{PREFIX}12345678/{RAY_FOLDER}") + SOCKET_ROOM > 107:
            parent = Path("/tmp")  # noqa: S108 - mkdtemp makes a private folder in it
        clear_left(parent)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        owned = _own(folder)
    except OSError as error:
        raise UnavailableError(
            f"no temporary folder can be made: {error.strerror or error}",
            hint="name one that can be written to with TMPDIR",
        ) from error
    try:
        yield folder, owned
    finally:
        # Processes that are still ending may write a last log line meanwhile.
        shutil.rmtree(folder, ignore_errors=True)
        os.close(owned)


def clear_left(parent: Path) -> None:
    """Remove the folders in `parent` whose processes have ended without removing them.

    Only folders of this user, and none that has no lock: it may be anything.
    """
    if sys.platform == "win32":
        return  # no locks of this kind, and no owners
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _lock(descriptor)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _own(folder: Path) -> int:
    """The descriptor of the folder's lock, which is there under its name only once it is locked."""
    draft = folder / f"{OWNER}.new"
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # no locks on this file system, so it is never cleared later
        _lock(descriptor)
        draft.rename(folder / OWNER)
    return descriptor


def _lock(descriptor: int) -> None:
    """Raise `OSError` where another process has the lock, and where there are no locks."""
    if sys.platform == "win32":
        raise OSError("no locks of this kind")
    import fcntl  # POSIX only

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
