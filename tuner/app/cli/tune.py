"""`tuner tune`: the fastest settings of a program that fit on a GPU."""

from __future__ import annotations

from pathlib import Path

import click

from tuner.app.cli.options import (
    emulated_gpu_options,
    json_option,
    margin_option,
    results_option,
    subcommand,
)
from tuner.app.cli.search import run_search
from tuner.app.programs import DEFAULT_TRIALS, write_space
from tuner.app.search.options import SearchOptions
from tuner.app.targets import load_targets
from tuner.core.kinds import Mode
from tuner.core.records import parse_margin
from tuner.report.terminal.render import echo


@subcommand(
    "tune",
    "tuner tune train.py --gpu rtx4090",
    "tuner tune train.py --gpu a6000 --knob micro_batch --knob lora_rank=16,32,64",
    "tuner tune --gpu h100_sxm -- train.py --epochs 3",
)
@emulated_gpu_options
@click.option(
    "--knob",
    "knobs",
    multiple=True,
    metavar="NAME[=A,B]",
    help="Setting to vary, and its values. Can be repeated. [default: micro_batch and "
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
@margin_option
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
    path = write_space(
        program,
        gpu_name,
        gpu_memory=gpu_memory,
        mode=Mode(mode),
        margin_fraction=lambda gpu: parse_margin(margin, gpu),
        knobs=knobs,
        path=space_path,
        report=lambda text: None if quiet else echo(text, err=True),
    )
    targets = load_targets(str(path), [gpu_name], results=results, gpu_memory=gpu_memory)
    options = SearchOptions(mode=Mode(mode), trials=trials, margin=margin)
    return run_search(targets, options, as_json=as_json, quiet=quiet, dry=False)
