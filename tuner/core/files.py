"""Reads files that may be from somebody else: never a pipe or a device, nor too large a one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import platformdirs

from tuner.core.errors import InputError


def read_file(path: Path, max_bytes: int) -> bytes:
    """The bytes of the file at `path`.

    Raises `FileNotFoundError` where there is none, and `InputError` for one that cannot be read,
    for what is no file (a pipe would be waited for, a device has no end), and for one of more than
    `max_bytes`.
    """
    try:
        # A pipe without a writer is not waited for either.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise InputError(f"{str(path)!r} is not a file")
            # Its size may be none that the file system tells, or change.
            data = b"" if found.st_size > max_bytes else file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # a null byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"cannot read {str(path)!r}: {reason}") from error
    if found.st_size > max_bytes or len(data) > max_bytes:
        raise InputError(
            f"{str(path)!r} is larger than the {max_bytes >> 20} MiB that such a file may have"
        )
    return data


def user_cache() -> Path | None:
    """The user's folder for caches of this program; None without a home directory."""
    try:
        return platformdirs.user_cache_path("tuner", appauthor=False)
    except RuntimeError:  # as in some containers
        return None
