"""`tuner check`: whether a program fits on a GPU, and the change that makes it fit."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from tuner.app.cli.emulated_text import print_emulation, print_last_lines
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
from tuner.core.expressions import show
from tuner.core.records import parse_margin
from tuner.core.units import format_duration, format_size
from tuner.emulator.emulation import Emulation
from tuner.program.program import read_program
from tuner.report.terminal.evidence import print_evidence
from tuner.report.terminal.render import echo, print_fields, print_json, settings_text
from tuner.space import parse_settings
from tuner.space.gpus import get_gpu, load_catalogue

if TYPE_CHECKING:
    from tuner.app.checking import BetterChange, CheckedProgram
    from tuner.app.program_predictions import PredictedProgram


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


def print_checked(checked: CheckedProgram) -> None:
    """The answer of the program as it is, and below it the change."""
    found, needed = checked.found, checked.needed
    if not isinstance(found, Emulation):
        print_predicted(found)
    elif isinstance(needed, Emulation) and needed.fits is not None:
        print_emulation(needed, refused=found)
    else:
        print_emulation(found)
    if checked.found.ended in ("error", "crash"):
        print_last_lines(checked.log_tail)
    echo()
    for knob, written, arrived in checked.ignored:
        setting = checked.settings[knob]
        echo(
            f"{setting.where}: {setting.name} is {show(written)}, and {show(arrived)} is what the "
            "training has"
        )
    if checked.suggestion is not None:
        _print_suggestion(checked, checked.suggestion)
    elif checked.found.fits is False or checked.needed is not None:
        _print_nothing_fits(checked)
    elif checked.runs > 1:
        echo("Nothing faster was found with the same effective batch, adapters and lengths.")
    for note in checked.notes:
        echo(f"note: {note}")
    what = "run" if checked.source == "emulated" else "prediction"
    number = f"{checked.runs} {what}{'s' * (checked.runs != 1)}"
    echo(f"{checked.source}, in {number}; nothing was written")


def _print_suggestion(checked: CheckedProgram, found: BetterChange) -> None:
    fits = bool(checked.found.fits)
    values = " ".join(f"{name}={show(value)}" for name, value in found.change.values.items())
    title = "Faster, and it fits" if fits else "This change fits"
    echo(f"{title}, with the same effective batch, adapters and lengths: {values}")
    limit = found.found.gpu.memory_bytes
    text = f"{format_size(found.found.used_bytes)} of {format_size(limit)}"
    speed = "" if found.step_s is None else f"{format_duration(found.step_s)} an optimizer step"
    if found.step_s is not None and found.speedup is not None and fits:
        speed += f", {found.speedup:.2f} times as fast as now"
    print_fields([("memory", f"{text}, {checked.source}"), ("speed", speed)], indent=2)
    echo()
    echo(found.change.difference, nl=False)
    echo()


def _print_nothing_fits(checked: CheckedProgram) -> None:
    if checked.least_bytes is None:
        return  # no change was tried
    echo("No change tried with the same effective batch, adapters and lengths fits.")
    margin = checked.found.margin_bytes / checked.found.gpu.memory_bytes
    larger = sorted(
        (
            gpu
            for gpu in load_catalogue().values()
            if gpu.memory_bytes * (1 - margin) >= checked.least_bytes
        ),
        key=lambda gpu: gpu.memory_bytes,
    )
    names = ", ".join(gpu.id for gpu in larger[:3])
    where = f": {names} would have room" if names else ""
    echo(f"The smallest takes {format_size(checked.least_bytes)}{where}.")


def checked_to_dict(checked: CheckedProgram) -> dict[str, Any]:
    """The answer as JSON types; `source` says what every number in it is."""
    found = checked.suggestion
    return {
        "source": checked.source,
        "fits": checked.found.fits,
        "program": checked.found.to_dict(),
        "needed": checked.needed.to_dict() if checked.needed is not None else None,
        "settings": {
            knob: {
                "name": setting.name,
                "value": setting.value,
                "where": setting.where,
                "problem": setting.problem,
                "arrived": checked.found.settings.get(knob),
            }
            for knob, setting in checked.settings.items()
        },
        "suggestion": None
        if found is None
        else {
            "values": dict(found.change.values),
            "difference": found.change.difference,
            "step_s": found.step_s,
            "speedup": found.speedup,
            "found": found.found.to_dict(),
        },
        "least_bytes": checked.least_bytes,
        "runs": checked.runs,
        "notes": list(checked.notes),
    }


DATA = "every sequence is of full length; data, logging and evaluation take no memory"
"""What every prediction of a program assumes."""


def print_predicted(found: PredictedProgram) -> None:
    """What was read, assumed and left out, and the numbers."""
    plan = found.plan
    echo()
    print_fields(
        [
            ("program", shlex.join(found.command)),
            ("trainer", plan.trainer),
            ("model", plan.model),
            ("GPU", found.gpu.name),
            ("read as", settings_text(plan.configuration)),
            ("assumed", "; ".join((*plan.assumed, DATA))),
            ("left out", ", ".join(plan.left_out)),
            ("notes", "; ".join(plan.notes)),
        ]
    )
    prediction = found.prediction
    print_evidence(prediction, fits=prediction.fits, limit_bytes=prediction.budget.limit_bytes)
