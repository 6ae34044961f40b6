"""How a published program is started for a row, and where its result is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.harnesses import GIB, Case, express
from benchmarks.accuracy.rows import Row
from benchmarks.emulated_runs.environments import Environment

Values = Mapping[str, float]
"""GiB by quantity: "allocated", "reserved", "loaded", "forward"."""


def measured(row: Row) -> tuple[str, Values]:
    """The GPU type of a row, and the values that were measured on it."""
    case = express(row)
    assert isinstance(case, Case), case
    names = ("allocated", "reserved", "loaded", "forward")
    given = {name: getattr(case.measured, name) for name in names}
    return case.gpu, {name: value / GIB for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Program:
    """One program. `command` gives the arguments of the interpreter, `read` the printed values."""

    name: str
    environment: Callable[[Row], Environment]
    command: Callable[[Row, Path, Path], list[str]]
    """Of a row, the folder of environments, and an empty folder for results."""
    read: Callable[[Row, str, Path], Values]
    """Of a row, the output, and the folder of results. Raises ValueError without values."""
    decimals: int = 4
