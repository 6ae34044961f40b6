"""Values that nobody could compute and that mattered, with the lines that asked for them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

from tuner.emulator.inside.lines import package_of, places

MOST_ROWS = 200
"""Rows of the list; further ones are counted in the last."""
UNKNOWN = "unknown"


class Unknowns:
    """Of this process: by operator, line and kind, how often it happened.

    A kind is "at most", "assumed" or "made up" (notes.py), or "unknown" for what has no value.
    """

    def __init__(self) -> None:
        self._rows: Counter[tuple[str, str | None, str, bool]] = Counter()

    def decided(self, operator: str, kind: str) -> None:
        """Such values decided the size of what `operator` returned."""
        self._add(operator, kind, decides_shape=True)

    def read(self, operator: str, kind: str = UNKNOWN) -> None:
        """Such values were read by the host, or lost, in `operator`: they may decide anything."""
        self._add(operator, kind, decides_shape=False)

    def rows(self) -> list[dict[str, Any]]:
        """JSON types only: operator, line (None outside of any), kind, decides_shape, times."""
        names = ("operator", "line", "kind", "decides_shape")
        return [
            {**dict(zip(names, row, strict=True)), "times": times}
            for row, times in self._rows.items()
        ]

    def _add(self, operator: str, kind: str, *, decides_shape: bool) -> None:
        own, library = places(frames_of(sys._getframe(1)))
        row = (operator, own or library, kind, decides_shape)
        if row not in self._rows and len(self._rows) >= MOST_ROWS:
            row = ("(more operators than can be listed)", None, kind, decides_shape)
        self._rows[row] += 1


def calling_package() -> str | None:
    """The package that called into PyTorch; None for the program's own code."""
    for filename, _, _ in frames_of(sys._getframe(1)):
        package = package_of(filename)
        if package not in ("python", "torch", ""):
            return package
    return ""


def frames_of(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    """(file, line, function) of a frame and of those around it, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
