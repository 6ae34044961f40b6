"""`tuner diff`: one program under two sets of library versions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuner.app.cli.options import emulated_gpu_options, json_option, margin_option, subcommand
from tuner.core.environment import this_python
from tuner.core.errors import EXIT_NOTHING_FITS, InputError
from tuner.core.records import parse_margin
from tuner.core.units import format_duration, format_size
from tuner.report.terminal.render import echo, print_fields, print_json
from tuner.report.terminal.tables import print_rows
from tuner.space.gpus import get_gpu

if TYPE_CHECKING:
    from tuner.app.stacks import CodeMemory, StackDifference, StackRun

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
    from tuner.app.stacks import compare_stacks
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


def _print(found: StackDifference) -> None:
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


def _fits(run: StackRun) -> str:
    return {True: "yes", False: "no", None: "unknown"}[run.found.fits]


def _size(run: StackRun, name: str) -> int:
    of = run.needed if name == "used_bytes" else run.needed.limiting
    return int(getattr(of, name)) if of is not None else 0


def _sizes(label: str, before: StackRun, after: StackRun, name: str) -> tuple[str, ...]:
    sizes = _size(before, name), _size(after, name)
    return label, *map(format_size, sizes), _change(*sizes)


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before and after else ""


def _print_code(code: tuple[CodeMemory, ...], whole_bytes: int) -> None:
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


def _place(one: CodeMemory) -> str:
    """As in "trainer/sft_trainer.py:1624 (logits and loss)"."""
    kind = one.kind.replace("_", " ")
    lines = ", ".join(map(str, one.lines[:_LINES]))
    return f"{one.file}:{lines} ({kind})" if one.file else f"no line of Python ({kind})"
