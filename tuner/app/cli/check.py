"""`tuner check`: whether a program fits on a GPU, and the change that makes it fit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from tuner.app.cli.options import (
    DurationType,
    RareOption,
    emulated_gpu_options,
    examples,
    json_option,
    model_option,
    set_option,
)
from tuner.core.errors import InputError, UnavailableError
from tuner.core.records import parse_margin
from tuner.program.program import read_program
from tuner.report.terminal.render import echo, print_json
from tuner.space import parse_settings
from tuner.space.gpus import get_gpu

if TYPE_CHECKING:
    from tuner.app.checking import CheckedProgram


@click.command(
    "check",
    epilog=examples(
        "tuner check train.py --gpu rtx4090",
        "tuner check --gpu rtx4090 -- train.py --batch-size 4",
        "tuner check axolotl.yml --gpu a6000",
        "tuner check train.py --gpu rtx4090 --predict --set max_length=2048",
        "tuner check --gpu h100_sxm -- torchrun --nproc-per-node 2 train.py",
    ),
)
@emulated_gpu_options
@click.option(
    "--gpus", type=int, metavar="N", help="Number of GPUs. [default: what the launcher starts]"
)
@click.option("--margin", metavar="SHARE", help="Memory to keep free. [default: 3%]")
@click.option(
    "--timeout", type=DurationType(), metavar="TIME", help="Stop each run after this time."
)
@click.option(
    "--no-changes",
    "improve",
    is_flag=True,
    default=True,
    flag_value=False,
    help="Only check the program as it is: one run.",
)
@click.option(
    "--predict",
    is_flag=True,
    help="Predict from the settings, in seconds. The default where nothing can be emulated.",
)
@model_option("With --predict: the model, where the program does not name it.")
@set_option
@click.option(
    "--seed", default=0, metavar="N", cls=RareOption, help="Random seed of made-up values."
)
@click.option("--quiet", is_flag=True, help="Print the answer only.")
@json_option
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(  # noqa: PLR0913 - one argument for each option
    *,
    gpu_name: str,
    gpu_memory: int | None,
    gpus: int | None,
    margin: str | None,
    timeout: float | None,
    improve: bool,
    predict: bool,
    model: str | None,
    settings: tuple[str, ...],
    seed: int,
    quiet: bool,
    as_json: bool,
    program: tuple[str, ...],
) -> None:
    """Check whether PROGRAM fits a GPU, and find the fastest change that does.

    PROGRAM is a script with its arguments, a notebook, an Axolotl, LLaMA-Factory, TRL or torchtune
    file, or any command after --. It runs unchanged for a few steps on an emulated GPU. Then
    micro-batch, accumulation and checkpointing are varied; effective batch, adapters and lengths
    stay. The change is shown as a diff; no file is written.

    Where nothing can be emulated, or with --predict, memory and speed are predicted from its
    settings and the trainer's defaults; --set and --model add what the program does not say.

    Exit codes: 0 fits, 1 doesn't fit, 2 the program failed, 3 can't be emulated or predicted,
    4 unknown.
    """
    # numpy, which no `--help` needs to wait for
    from tuner.app.checking import check_program
    from tuner.app.cli.checked_text import checked_to_dict, print_checked
    from tuner.app.listener import quiet_libraries
    from tuner.app.program_predictions import ProgramPredictions
    from tuner.app.program_runs import ProgramRuns

    if gpus is not None and gpus < 1:
        raise InputError("--gpus is 1 or more")
    predict = predict or model is not None or bool(settings)
    gpu = get_gpu(gpu_name, memory_bytes=gpu_memory)
    margin_fraction = parse_margin(margin, gpu)
    report = _nothing if quiet else _say

    def predicted() -> CheckedProgram:
        read = read_program(program, is_run=False)
        given = parse_settings(settings)
        with quiet_libraries():
            predictions = ProgramPredictions(read, gpu, margin_fraction, given, model, gpus)
            return check_program(predictions, improve=improve, report=report)

    if predict:
        checked = predicted()
    else:
        try:
            read = read_program(program)
            with ProgramRuns(read, gpu, gpus, margin_fraction, seed, timeout) as runs:
                checked = check_program(runs, improve=improve, report=report)
        except UnavailableError as error:
            _say(f"it cannot be emulated: {error.message} ({error.hint}); its settings are read")
            checked = predicted()
    if as_json:
        print_json(checked_to_dict(checked))
    else:
        print_checked(checked)
    raise click.exceptions.Exit(checked.found.exit_code)


def _say(text: str) -> None:
    echo(f"{text} ...", err=True)
    sys.stderr.flush()


def _nothing(text: str) -> None:
    """Where only the answer is wanted."""
