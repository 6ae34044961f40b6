"""Files are replaced whole or not at all, with a dated copy of what they were beside them."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from tuner.core.errors import InputError, Problem, UnavailableError

MAX_BYTES = 4 * 1024 * 1024
"""A file that people edit is far smaller; anything larger is the wrong one."""

MAX_NOTEBOOK_BYTES = 256 * 1024 * 1024
"""Pictures and tables that cells have shown stand in a notebook; `MAX_BYTES` is for its code."""


def read_bytes(path: Path) -> bytes:
    """The content of a file that may be replaced. Raises `InputError` where it may not."""
    most = MAX_NOTEBOOK_BYTES if path.suffix.lower() == ".ipynb" else MAX_BYTES
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: not a file")
        if status.st_size > most:
            raise InputError(f"{path}: larger than {most} bytes, which no configuration is")
        if status.st_nlink > 1:
            raise InputError(f"{path}: has {status.st_nlink} hard links; replacing it parts them")
        if not status.st_mode & 0o222 or not os.access(path, os.W_OK):
            raise InputError(f"{path}: is read-only")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def replace_files(contents: Mapping[Path, tuple[bytes, bytes]]) -> dict[Path, Path]:
    """Replace the content (before, after) of all files or of none; returns their backups.

    Links are followed. Mode, owner and extended attributes stay. Raises `InputError` if a file was
    changed meanwhile, and `UnavailableError` if the disk refuses.
    """
    when = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    _check_unchanged(contents)
    drafts: dict[Path, Path] = {}
    backups: dict[Path, Path] = {}
    replaced: set[Path] = set()
    try:
        for path, (before, after) in contents.items():
            real = path.resolve()
            drafts[path] = _copy(real, real.with_name(f".{real.name}.{os.getpid()}.tmp"), after)
            os.utime(drafts[path])
            backups[path] = _backup(path, before, when)
        _check_unchanged(contents)
        for path, draft in drafts.items():
            draft.replace(path.resolve())
            replaced.add(path)
    except (OSError, InputError) as error:
        try:
            for path in replaced:
                shutil.move(backups[path], path.resolve())
        except OSError:
            copies = ", ".join(map(str, backups.values()))
            raise UnavailableError(
                f"cannot write {error}, and cannot put back what was written before",
                hint=f"the files as they were: {copies}",
            ) from error
        for backup in backups.values():
            with contextlib.suppress(OSError):  # a copy too many does no harm
                backup.unlink(missing_ok=True)
        if isinstance(error, InputError):
            raise
        raise UnavailableError(
            f"cannot write {error.filename or 'the files'}: {error.strerror or error}",
            hint="every file is as it was",
        ) from error
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
    return backups


def _check_unchanged(contents: Mapping[Path, tuple[bytes, bytes]]) -> None:
    problems = [
        Problem("was changed meanwhile by another program", str(path))
        for path, (before, _) in contents.items()
        if read_bytes(path) != before
    ]
    if problems:
        raise InputError("nothing was written", problems=problems, hint="run the command again")


def _backup(path: Path, data: bytes, when: str) -> Path:
    for number in range(1, 1000):
        suffix = "" if number == 1 else f"-{number}"
        with contextlib.suppress(FileExistsError):
            return _copy(path, path.with_name(f"{path.name}.{when}{suffix}.bak"), data)
    raise FileExistsError(0, "a thousand backups of this second are there", str(path))


def _copy(path: Path, copy: Path, data: bytes) -> Path:
    """A new file with `data`, and with the mode, the owner and the attributes of `path`."""
    with copy.open("xb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            status, own = path.stat(), copy.stat()
            if (status.st_uid, status.st_gid) != (own.st_uid, own.st_gid):
                os.chown(copy, status.st_uid, status.st_gid)
            shutil.copystat(path, copy)
        except OSError:
            copy.unlink(missing_ok=True)
            raise
    return copy
