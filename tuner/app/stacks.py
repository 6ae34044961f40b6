"""One program under two sets of library versions: what it needs in each, and which code grew."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.core.errors import InputError
from tuner.core.supervised import Tail
from tuner.emulator import Machine
from tuner.emulator.emulation import EmulatedAllocation, Emulation
from tuner.program.edit.source import PYTHON
from tuner.program.launch import runnable
from tuner.program.program import read_program

_PACKAGES = """
import importlib.metadata, json
found = {}
for each in importlib.metadata.distributions():  # of two that shadow each other, the first counts
    found.setdefault(each.name, each.version)
print(json.dumps({name: version for name, version in found.items() if name}))
"""
_ANSWER_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class StackRun:
    """The program in one environment; `needed` has more memory, if `found` ran out."""

    python: str
    packages: Mapping[str, str]
    found: Emulation
    needed: Emulation
    log_tail: str

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {"python": self.python, "fits": self.found.fits, "needed": self.needed.to_dict()}


@dataclass(frozen=True, slots=True)
class CodeMemory:
    """Memory that the lines of one file hold at the peak of each run, for one purpose.

    `lines` are those of the second run (else of the first), the largest first.
    """

    kind: str
    file: str
    before_bytes: int
    after_bytes: int
    lines: tuple[int, ...]

    @property
    def grown_bytes(self) -> int:
        """The growth in the second run; negative for less."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True)
class StackDifference:
    """Two runs, the packages that differ (None: not installed), and the files, by what changed."""

    before: StackRun
    after: StackRun
    packages: Mapping[str, tuple[str | None, str | None]]
    code: tuple[CodeMemory, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "source": "emulated",
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "packages": {name: list(pair) for name, pair in self.packages.items()},
            "code": [
                {**dataclasses.asdict(one), "grown_bytes": one.grown_bytes} for one in self.code
            ],
        }


def compare_stacks(
    stacks: Sequence[Path], program: Sequence[str], machine: Machine, *, steps: int
) -> StackDifference:
    """Run `program` in two environments, each named by its folder or its interpreter.

    Raises `InputError` where one is no environment or lacks the program, and `UnavailableError`
    where it cannot be emulated.
    """
    before, after = (_run(_interpreter(stack), program, machine, steps) for stack in stacks)
    names = sorted({*before.packages, *after.packages}, key=str.lower)
    pairs = {name: (before.packages.get(name), after.packages.get(name)) for name in names}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return StackDifference(before, after, differing, _code(before, after))


def _interpreter(stack: Path) -> Path:
    """The Python of an environment. A link is not followed: it is what makes the environment."""
    for path in (stack, stack / "bin" / "python"):
        if path.is_file() and os.access(path, os.X_OK):
            return path.absolute()
    raise InputError(
        f"there is no environment {str(stack)!r}",
        hint="name the folder or the Python of one; `uv venv old-env && uv pip install --python "
        "old-env torch transformers==4.48.1` makes one",
    )


def _run(python: Path, program: Sequence[str], machine: Machine, steps: int) -> StackRun:
    # As an activated environment: a launcher finds its own Python by PATH.
    activated = {"PATH": os.pathsep.join((str(python.parent), os.environ.get("PATH", os.defpath)))}
    tail = Tail()
    with _command(python, program) as command:
        run = functools.partial(
            machine.run, command, steps=steps, output=tail, environment=activated
        )
        found = needed = run()
        if found.ended == "oom":
            needed = run(on_larger_gpu=True)
    return StackRun(str(python), _packages(python), found, needed, tail.text)


@contextlib.contextmanager
def _command(python: Path, program: Sequence[str]) -> Iterator[list[str]]:
    """The command line of `program` in the environment of `python`."""
    if Path(program[0]).suffix in PYTHON:  # a script or a notebook, as `tuner check` takes it
        with runnable(read_program(program)) as command:
            yield [str(python), *command[1:]]
        return
    own = python if program[0] in ("python", "python3") else python.with_name(program[0])
    if not own.is_file():
        raise InputError(
            f"the environment of {str(python)!r} has no program {program[0]!r}",
            hint="name one that is installed in both, or a script of Python",
        )
    yield [str(own), *program[1:]]


def _packages(python: Path) -> dict[str, str]:
    """The distributions that an interpreter finds, by PYTHONPATH too, with their versions."""
    answer = subprocess.run(  # noqa: S603 - the user's own environment
        [python.absolute(), "-c", _PACKAGES],
        cwd=python.parent,  # no file of the current folder stands for a library
        capture_output=True,
        check=True,
        timeout=_ANSWER_WITHIN_S,
    )
    return dict(json.loads(answer.stdout))


def _code(before: StackRun, after: StackRun) -> tuple[CodeMemory, ...]:
    """Files by how much more or less they hold: numbers of lines differ between versions."""
    first, second = _by_file(before.needed), _by_file(after.needed)
    found = [
        CodeMemory(
            kind,
            file,
            sum(one.bytes for one in first.get((kind, file), ())),
            sum(one.bytes for one in second.get((kind, file), ())),
            _lines(second.get((kind, file)) or first[kind, file]),
        )
        for kind, file in {**first, **second}
    ]
    return tuple(sorted(found, key=lambda one: -abs(one.grown_bytes)))


def _by_file(found: Emulation) -> dict[tuple[str, str], list[EmulatedAllocation]]:
    grouped: dict[tuple[str, str], list[EmulatedAllocation]] = defaultdict(list)
    for one in found.limiting.allocations if found.limiting else ():
        grouped[one.kind, (one.where or one.line).rpartition(":")[0]].append(one)
    return grouped


def _lines(allocations: Sequence[EmulatedAllocation]) -> tuple[int, ...]:
    ordered = sorted(allocations, key=lambda one: -one.bytes)
    numbers = [(one.where or one.line).rpartition(":")[2] for one in ordered]
    return tuple(int(number) for number in dict.fromkeys(numbers) if number.isdigit())
