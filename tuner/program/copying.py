"""A copy of a program's folder in which some files are other ones; the folder stays as it is.

Files that a program opens or imports by itself are found in the copy as in the original: scripts
and settings are copied, everything else is a link to the original.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.apply.source import READERS
from tuner.program.running import PREFIX, clear_left

_MOST_BYTES = 1024 * 1024
"""Of a file that is copied: a larger one holds data."""

_SKIPPED = ("__pycache__", ".git")


@dataclass(frozen=True, slots=True)
class CopiedFolder:
    """A folder and its copy."""

    original: Path
    copy: Path

    def path(self, path: Path) -> Path:
        """Where `path` is in the copy; `path` itself where it is not below the folder."""
        real = _plain(path)
        if not real.is_relative_to(self.original):
            return path
        return self.copy / real.relative_to(self.original)

    def words(self, words: Sequence[str]) -> list[str]:
        """The words of a command, with absolute paths of the folder as those of the copy."""
        return [str(self.path(Path(w))) if Path(w).is_absolute() else w for w in words]

    def original_text(self, text: str) -> str:
        """What a program says in the copy, with the names of the original."""
        return text.replace(str(self.copy), str(self.original))


@contextlib.contextmanager
def changed_copy(folder: Path, changed: Mapping[Path, bytes]) -> Iterator[CopiedFolder]:
    """A copy of what is below `folder` and the `changed` files, by path; gone when the block ends.

    Its `original` is the folder that all of them are in.
    """
    clear_left()
    paths = {_plain(path): data for path, data in changed.items()}
    top = os.path.commonpath([_plain(folder), *(path.parent for path in paths)])
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as scratch:
        found = CopiedFolder(Path(top), Path(scratch, Path(top).name or "root"))
        _copy(found.original, found.copy, paths)
        yield found


def _plain(path: Path) -> Path:
    """The absolute path without `..`; links stay, which `resolve` would follow."""
    return Path(os.path.normpath(path.absolute()))


def _copy(original: Path, copy: Path, changed: Mapping[Path, bytes]) -> None:
    copy.mkdir()
    for entry in sorted(original.iterdir()):
        target = copy / entry.name
        if entry in changed:
            target.write_bytes(changed[entry])
        elif entry.name in _SKIPPED:
            continue
        elif entry.is_dir() and not entry.is_symlink() and _has_own(entry, changed):
            _copy(entry, target, changed)
        elif entry.suffix in READERS and entry.is_file() and entry.stat().st_size <= _MOST_BYTES:
            target.write_bytes(entry.read_bytes())  # a link would lead out of the copy again
        else:
            target.symlink_to(entry)


def _has_own(folder: Path, changed: Mapping[Path, bytes]) -> bool:
    """Whether a folder has modules, or a changed file somewhere below it."""
    if any(path.is_relative_to(folder) for path in changed):
        return True
    if (folder / "pyvenv.cfg").exists():
        return False
    return any(folder.glob("*.py"))
