"""`tuner tune`: the fastest settings of a program that fit on a GPU."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from tuner.app.cli.options import (
    emulated_gpu_options,
    json_option,
    margin_option,
    model_option,
    results_option,
    set_option,
    subcommand,
)
from tuner.app.cli.results import write_asked
from tuner.app.cli.search import run_search
from tuner.app.target import load_targets
from tuner.core.errors import UnavailableError
from tuner.core.expressions import settings_text, show
from tuner.core.units import format_size, significant
from tuner.report.terminal.front import print_front
from tuner.report.terminal.render import echo, print_fields, print_json, say
from tuner.report.terminal.verdict import READ_AS, field_lines, print_lines
from tuner.searches.options import TUNE_TRIALS, Mode, SearchOptions
from tuner.space.gpus import get_gpu

if TYPE_CHECKING:
    from tuner.app.program_front import ProgramFront

_OF_TRIALS = {
    "trials": "--trials",
    "mode": "--mode",
    "space_path": "--space",
    "results": "--results",
}
"""Parameters without an effect where nothing is run."""


@subcommand(
    "tune",
    "tuner tune train.py --gpu rtx4090",
    "tuner tune train.py --gpu rtx4090 --predict    # in seconds, nothing is run",
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
    default=TUNE_TRIALS,
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
    "--predict", is_flag=True, help="Predict all of them from the program's settings; run nothing."
)
@click.option(
    "--apply",
    "write",
    is_flag=True,
    help="With --predict: write the change into the program's files, after a question.",
)
@model_option("With --predict: the model, if the program doesn't name it.")
@set_option
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
    predict: bool,
    write: bool,
    model: str | None,
    settings: dict[str, str],
    space_path: Path | None,
    margin: str | None,
    quiet: bool,
    results: Path,
    as_json: bool,
    program: tuple[str, ...],
) -> int:
    """Find the fastest settings of PROGRAM that fit on a GPU.

    PROGRAM is as for `tuner check`. A few emulated runs predict all settings; trials of copies
    verify the front. The search space is written to a file: edit it, then continue with `tuner
    search`. With --predict nothing is run: it prints the front, and the change as a diff. Exit code
    1 if nothing fits.
    """
    from tuner.app.programs import ProgramOptions, tune_predicted, write_space  # numpy

    if predict:
        _refuse_of_trials()
        gpu = get_gpu(gpu_name, memory_bytes=gpu_memory)
        options = ProgramOptions(margin=margin, model=model, settings=settings)
        found = tune_predicted(program, gpu, options, knobs)
        print_json(found.to_dict()) if as_json else _print_program_front(found)
        if write:
            write_asked(found.change)
        return found.exit_code
    if model is not None or settings or write:
        raise click.UsageError("--model, --set and --apply need --predict.")
    try:
        path = write_space(
            program,
            gpu_name,
            gpu_memory=gpu_memory,
            mode=Mode(mode),
            margin=margin,
            knobs=knobs,
            path=space_path,
            report=lambda text: None if quiet else echo(text, err=True),
        )
    except UnavailableError as error:
        varied = [word for knob in knobs for word in ("--knob", knob)]
        words = ["tuner", "tune", "--predict", "--gpu", gpu_name, *varied, "--", *program]
        hint = f"predict them instead: {shlex.join(words)}; or {error.hint}"
        raise UnavailableError(error.message, hint=hint) from error
    targets = load_targets(str(path), [gpu_name], results=results, gpu_memory=gpu_memory)
    how = SearchOptions(mode=Mode(mode), trials=trials, margin=margin)
    return run_search(targets, how, as_json=as_json, quiet=quiet)


def _print_program_front(found: ProgramFront) -> None:
    """The recommended change as a diff, then the front that it is from."""
    base, best = found.base, found.view.best
    limit = base.gpu.memory_bytes
    if best is None:
        least = f"{format_size(found.least_bytes)} of {format_size(limit)}"
        say(f"nothing fits: the smallest takes {least}")
    elif len(found.view.records) == 1:
        echo("fits; no other settings could be predicted")
    elif found.change is None:
        echo("fits: keep it as it is; none of these settings is clearly faster")
    else:
        values = settings_text(found.change.values)
        gain = best.evidence.speed.samples_per_s / base.prediction.speed.samples_per_s
        than = f"{significant(gain)} times as fast as now"
        now = than if base.fits else "which fits; the program as it is doesn't"
        memory = f"{format_size(best.evidence.memory.device_bytes)} of {format_size(limit)}"
        say(f"recommended: {values}, {memory}, {now}")
    print_lines(field_lines([(READ_AS, base.plan.read_as)]))
    if best is not None and found.change is not None:
        echo()
        echo(found.change.difference, nl=False)
    echo()
    print_fields(
        [
            ("program", shlex.join(base.command)),
            ("trainer", base.plan.trainer),
            ("model", base.plan.model),
            ("GPU", base.gpu.name),
            (
                "varied",
                "; ".join(f"{n}: {', '.join(map(show, v))}" for n, v in found.varied.items()),
            ),
            ("notes", "; ".join((*base.plan.notes, *found.notes))),
        ]
    )
    echo()
    print_front(found.view, best="recommended" if found.change is not None else "the fastest")
    echo(f"predicted, {len(found.view.records)} configurations; nothing was run")


def _refuse_of_trials() -> None:
    """Raise `UsageError` for options of trials that were typed beside --predict."""
    context = click.get_current_context()
    typed = [
        option
        for name, option in _OF_TRIALS.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if typed:
        raise click.UsageError(f"{', '.join(typed)} and --predict contradict each other.")
