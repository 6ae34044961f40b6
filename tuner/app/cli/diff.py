"""`tuner diff`: one program under two sets of library versions."""

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
from typing import TYPE_CHECKING, Any

import click

from tuner.app.cli import subcommand
from tuner.app.cli.options import emulated_gpu_options, json_option, margin_option
from tuner.core.environment import this_python
from tuner.core.errors import EXIT_NOTHING_FITS, InputError
from tuner.core.records import parse_margin
from tuner.core.supervised import Tail
from tuner.core.units import format_duration, format_size
from tuner.program.edit.source import PYTHON
from tuner.program.launch import runnable
from tuner.program.program import read_program
from tuner.report.terminal.render import echo, print_fields, print_json
from tuner.report.terminal.tables import print_rows
from tuner.space.gpus import get_gpu

if TYPE_CHECKING:
    from tuner.emulator import Machine
    from tuner.emulator.emulation import EmulatedAllocation, Emulation

_ROWS = 8
"""Files and packages that are shown; `--json` has all."""

_LINES = 3
"""Lines of a file that are shown."""

_LEAST = 0.001
"""Share of the memory that a file must have more or less to be shown."""


@subcommand(
    "diff",
    "tuner diff --gpu rtx4090 --stack old-env --stack new-env -- train.py",
    "tuner diff --gpu rtx4090 --stack old-env -- python train.py --bs 4",
    context_settings={"allow_interspersed_args": False},
)
@emulated_gpu_options
@click.option(
    "--stack",
    "stacks",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="ENV",
    help="A virtual environment or its Python; of two, the older first.",
)
@click.option("--gpus", default=1, show_default=True, metavar="N", help="Number of GPUs.")
@click.option(
    "--steps", default=3, show_default=True, metavar="N", help="Optimizer steps that are run."
)
@margin_option
@json_option
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(  # noqa: PLR0913 - one argument for each option
    *,
    program: tuple[str, ...],
    gpu_name: str,
    gpu_memory: int | None,
    stacks: tuple[Path, ...],
    gpus: int,
    steps: int,
    margin: str | None,
    as_json: bool,
) -> None:
    """Compare what PROGRAM needs under two sets of library versions.

    Runs it in each environment on an emulated GPU and names the packages that differ, the memory
    and time that changed, and the lines of code that hold more. Each environment needs a CUDA
    build of PyTorch; nothing of tuner. `uv venv` makes one.

    Exit codes: 0 it fits under the second, 1 it doesn't, 2 the program failed in one, 3 something
    isn't emulated, 4 unknown.
    """
    from tuner.emulator import Machine

    if not 1 <= len(stacks) <= 2:
        raise InputError(
            f"{len(stacks)} environments were named, and two are compared",
            hint="--stack OLD --stack NEW; with one, the other is the one that runs tuner",
        )
    gpu = get_gpu(gpu_name, memory_bytes=gpu_memory)
    machine = Machine(gpu, gpus, margin_fraction=parse_margin(margin, gpu))
    named = (*stacks, Path(this_python()))[:2]
    found = compare_stacks(named, program, machine, steps=steps)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)
    codes = [run.needed.exit_code for run in (found.before, found.after)]
    failed = [code for code in codes if code > EXIT_NOTHING_FITS]
    raise click.exceptions.Exit(min(failed, default=found.after.found.exit_code))


def _print(found: _StackDifference) -> None:
    from tuner.app.cli.emulated_text import print_last_lines
    from tuner.emulator.machine import ROOM

    before, after = found.before, found.after
    changed = [
        f"{name} {old or 'not installed'} -> {new or 'not installed'}"
        for name, (old, new) in found.packages.items()
    ]
    more = f", and {len(changed) - _ROWS} more" if len(changed) > _ROWS else ""
    print_fields(
        [
            ("GPU", after.found.gpu.name),
            ("before", before.python),
            ("after", after.python),
            ("packages", ", ".join(changed[:_ROWS]) + more if changed else "the same in both"),
            ("source", "emulated"),
        ]
    )
    one, other = before.needed.time, after.needed.time
    step = []
    if one is not None and other is not None:
        times = one.step_s, other.step_s
        step.append(("step", *map(format_duration, times), _change(*times)))
    echo()
    print_rows(
        ["", "before", "after", "change"],
        [
            ("fits", _fits(before), _fits(after), ""),
            _sizes("device memory", before, after, "used_bytes"),
            _sizes("allocated", before, after, "peak_allocated_bytes"),
            *step,
        ],
        right=("before", "after", "change"),
    )
    _print_code(found.code, after.needed.used_bytes or before.needed.used_bytes)
    for name, run in (("before", before), ("after", after)):
        if run.needed is not run.found:
            echo(
                f"\nnote: {name} ran out of memory; its numbers are those of a GPU with {ROOM} "
                "times the memory, whose allocator keeps more"
            )
        if run.needed.ended in ("error", "crash"):
            print_last_lines(run.log_tail, of=f"{name}: the program")


def _fits(run: _StackRun) -> str:
    return {True: "yes", False: "no", None: "unknown"}[run.found.fits]


def _size(run: _StackRun, name: str) -> int:
    of = run.needed if name == "used_bytes" else run.needed.limiting
    return int(getattr(of, name)) if of is not None else 0


def _sizes(label: str, before: _StackRun, after: _StackRun, name: str) -> tuple[str, ...]:
    sizes = _size(before, name), _size(after, name)
    return label, *map(format_size, sizes), _change(*sizes)


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before and after else ""


def _print_code(code: tuple[_CodeMemory, ...], whole_bytes: int) -> None:
    shown = [one for one in code if abs(one.grown_bytes) >= _LEAST * whole_bytes][:_ROWS]
    if not shown:
        echo("\nNo line of code holds more or less at the peak")
        return
    echo("\nCode that holds more or less at the peak")
    print_rows(
        ["change", "before", "after", "allocated at"],
        [
            (
                f"{'+' if one.grown_bytes > 0 else '-'}{format_size(abs(one.grown_bytes))}",
                format_size(one.before_bytes) if one.before_bytes else "",
                format_size(one.after_bytes) if one.after_bytes else "",
                _place(one),
            )
            for one in shown
        ],
        right=("change", "before", "after"),
    )


def _place(one: _CodeMemory) -> str:
    """As in "trainer/sft_trainer.py:1624 (logits and loss)"."""
    kind = one.kind.replace("_", " ")
    lines = ", ".join(map(str, one.lines[:_LINES]))
    return f"{one.file}:{lines} ({kind})" if one.file else f"no line of Python ({kind})"


_PACKAGES = """
import importlib.metadata, json
found = {}
for each in importlib.metadata.distributions():  # of two that shadow each other, the first counts
    found.setdefault(each.name, each.version)
print(json.dumps({name: version for name, version in found.items() if name}))
"""
_ANSWER_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class _StackRun:
    """The program in one environment; `needed` has more memory, if `found` ran out."""

    python: str
    packages: Mapping[str, str]
    found: Emulation
    needed: Emulation
    log_tail: str

    def to_dict(self) -> dict[str, Any]:
        return {"python": self.python, "fits": self.found.fits, "needed": self.needed.to_dict()}


@dataclass(frozen=True, slots=True)
class _CodeMemory:
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
class _StackDifference:
    """Two runs, the packages that differ (None: not installed), and the files, by what changed."""

    before: _StackRun
    after: _StackRun
    packages: Mapping[str, tuple[str | None, str | None]]
    code: tuple[_CodeMemory, ...]

    def to_dict(self) -> dict[str, Any]:
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
) -> _StackDifference:
    """Run `program` in two environments, each named by its folder or its interpreter.

    Raises `InputError` where one is no environment or lacks the program, and `UnavailableError`
    where it cannot be emulated.
    """
    before, after = (_run(_interpreter(stack), program, machine, steps) for stack in stacks)
    names = sorted({*before.packages, *after.packages}, key=str.lower)
    pairs = {name: (before.packages.get(name), after.packages.get(name)) for name in names}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return _StackDifference(before, after, differing, _code(before, after))


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


def _run(python: Path, program: Sequence[str], machine: Machine, steps: int) -> _StackRun:
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
    return _StackRun(str(python), _packages(python), found, needed, tail.text)


@contextlib.contextmanager
def _command(python: Path, program: Sequence[str]) -> Iterator[list[str]]:
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


def _code(before: _StackRun, after: _StackRun) -> tuple[_CodeMemory, ...]:
    """Files by how much more or less they hold: numbers of lines differ between versions."""
    first, second = _by_file(before.needed), _by_file(after.needed)
    found = [
        _CodeMemory(
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
