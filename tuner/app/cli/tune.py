"""`tuner tune`: the fastest settings of somebody's own program that fit a GPU."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuner.app.cli.options import (
    emulated_gpu_options,
    examples,
    json_option,
    results_option,
)
from tuner.app.cli.search import run_search
from tuner.app.device import find_gpu, is_cpu
from tuner.app.measuring import Mode
from tuner.app.search.plan import SearchOptions
from tuner.app.search.supported import can_emulate
from tuner.app.targets import load_targets
from tuner.core.errors import InputError
from tuner.core.gpu import Gpu
from tuner.core.records import KnobValue, parse_margin
from tuner.program.program import Program, read_program
from tuner.program.settings import find_settings
from tuner.program.space_text import knobs_of, space_text
from tuner.report.terminal.render import echo

if TYPE_CHECKING:
    from tuner.emulator.emulation import Emulation

DEFAULT_TRIALS = 6


@click.command(
    "tune",
    epilog=examples(
        "tuner tune train.py --gpu rtx4090",
        "tuner tune train.py --gpu a6000 --knob micro_batch --knob lora_rank=16,32,64",
        "tuner tune --gpu h100_sxm -- train.py --epochs 3",
    ),
)
@emulated_gpu_options
@click.option(
    "--knob",
    "knobs",
    multiple=True,
    metavar="NAME[=A,B]",
    help="Setting to vary, and its values; repeatable. [default: micro_batch and "
    "gradient_checkpointing, which keep the training's result]",
)
@click.option(
    "--trials",
    type=click.IntRange(1),
    default=DEFAULT_TRIALS,
    show_default=True,
    metavar="N",
    help="Trials to run, known ones included.",
)
@click.option(
    "--mode",
    type=click.Choice([str(Mode.EMULATE), str(Mode.MEASURE)]),
    default=str(Mode.EMULATE),
    show_default=True,
    help="Run trials on an emulated GPU or on a real one.",
)
@click.option(
    "--space",
    "space_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to write the search space. [default: tune-PROGRAM.yaml]",
)
@click.option("--margin", metavar="SHARE", help="Memory to keep free. [default: 3%]")
@click.option("--quiet", is_flag=True, help="Print the result only.")
@results_option
@json_option
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(  # noqa: PLR0913 - one argument for each option
    *,
    gpu_name: str,
    gpu_memory: int | None,
    knobs: tuple[str, ...],
    trials: int,
    mode: str,
    space_path: Path | None,
    margin: str | None,
    quiet: bool,
    results: Path,
    as_json: bool,
    program: tuple[str, ...],
) -> int:
    """Search the settings of PROGRAM for the fastest that fits a GPU.

    PROGRAM is as for `tuner check`. Its settings are found in its files and on its command line,
    and varied in copies. A few emulated runs predict the whole space; trials verify the front. The
    space is written to a file: edit it, then continue with `tuner search`. Exit code 1 if nothing
    fits.
    """
    gpu = find_gpu(gpu_name, memory_bytes=gpu_memory)
    if Mode(mode) is Mode.EMULATE and is_cpu(gpu):
        raise InputError(
            "a processor is not emulated", hint="--mode measure runs the trials on this one"
        )
    read = read_program(program)
    path = space_path or Path(f"tune-{Path(read.main or program[0]).stem}.yaml")
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"--space {str(path)!r} is not a .yaml file")
    settings = find_settings(read)
    arrived: Mapping[str, KnobValue] = {}
    fits = True
    if Mode(mode) is Mode.EMULATE or can_emulate(gpu):
        if not quiet:
            echo("running the unchanged program ...", err=True)
            sys.stderr.flush()
        base = _as_it_is(read, gpu, parse_margin(margin, gpu))
        arrived, fits = base.settings, bool(base.fits)
    elif not quiet:
        echo("settings are read from its files: nothing was run to see which arrive", err=True)
    found = knobs_of(read, settings, arrived, knobs)
    text = space_text(path.stem, read, program, settings, arrived, found, fits=fits)
    _write(path, text, gpu_name)
    targets = load_targets(str(path), [gpu_name], results=results, gpu_memory=gpu_memory)
    options = SearchOptions(mode=Mode(mode), trials=trials, margin=margin)
    return run_search(targets, options, as_json=as_json, quiet=quiet, dry=False)


def _as_it_is(program: Program, gpu: Gpu, margin_fraction: float | None) -> Emulation:
    """An emulated run of the program. Raises `InputError` where it comes to no step."""
    from tuner.app.program_runs import ProgramRuns  # numpy

    with ProgramRuns(program, gpu, margin_fraction=margin_fraction) as runs:
        base = runs.as_it_is(roomy=True)
    if base.steps == 0:
        why = f": {base.error.message}" if base.error else ""
        raise InputError(
            f"the program reached no optimizer step{why}",
            hint=f"`tuner check` shows why; its last lines: {runs.log_tail[-600:].strip()}",
        )
    return base


def _write(path: Path, text: str, gpu_name: str) -> None:
    """The space at `path`. Raises `InputError` where another one is there."""
    if path.exists() and path.read_text(encoding="utf-8") != text:
        search = ("tuner", "search", "--space", str(path), "--gpu", gpu_name)
        raise InputError(
            f"{path} exists with other content",
            hint=f"search it with `{shlex.join(search)}`, or name another with --space",
        )
    path.write_text(text, encoding="utf-8")
