"""Which line of code something is due to: the program's own, and the library's behind it."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

_OURS = str(Path(__file__).resolve().parents[1])
_STANDARD = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
_PACKAGES = ("site-packages", "dist-packages")
_TORCH = "torch"
# What torch.compile generates lies in a cache anywhere: a hash, below the hash's first letters.
_INDUCTOR = re.compile(r"/(?P<start>[a-z0-9]{2})/c(?P=start)[a-z2-7]{40,}\.py$")


@cache
def package_of(filename: str) -> str | None:
    """The package that a file belongs to; None for the program's own code.

    "python" is the standard library, and "" is the emulator's own.
    """
    if not filename or filename.startswith("<"):
        return "python"
    if _INDUCTOR.search(filename):
        return _TORCH
    parts = Path(filename).parts
    for folder in _PACKAGES:
        if folder in parts:
            rest = parts[parts.index(folder) + 1 :]
            return rest[0].removesuffix(".py") if rest else "python"
    path = os.path.realpath(filename)
    if path.startswith(_OURS):
        return ""
    if any(path.startswith(folder) for folder in _STANDARD):
        return "python"
    return None


def shown(filename: str, line: int) -> str:
    """A place as people write it: below the folder that the program runs in, else with its folder.

    Inside packages that is the last folder and the file.
    """
    if package_of(filename) is None:
        below = os.path.relpath(filename)
        if not below.startswith(os.pardir):
            return f"{below}:{line}"
    return f"{Path(*Path(filename).parts[-2:])}:{line}"


def places(frames: Iterable[tuple[str, int, str]]) -> tuple[str | None, str | None]:
    """The innermost line of the program's own code, and the innermost outside of PyTorch.

    `frames` are (file, line, function), the innermost first.
    """
    own = library = None
    for filename, line, _ in frames:
        package = package_of(filename)
        if package is None:
            own = shown(filename, line)
            return own, library or own
        if library is None and package not in ("python", _TORCH, ""):
            library = shown(filename, line)
    return own, library


def program_line(frame: FrameType | None, *, frames: Any = None) -> str | None:
    """The program's own line that runs in `frame` or above it; in `frames` of a traceback."""
    if frames is not None:
        summary = [(f.filename, f.lineno or 0, f.name) for f in reversed(frames)]
        return places(summary)[0]
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return places(found)[0]
