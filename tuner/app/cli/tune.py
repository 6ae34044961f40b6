"""`tuner tune` and `tuner search`: the fastest settings that fit, of a program or of a space."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from tuner.app.cli import options as opts
from tuner.app.cli import subcommand
from tuner.app.cli.answers import print_all_searched, print_searched
from tuner.app.cli.results import write_asked
from tuner.app.listener import quiet_libraries
from tuner.app.target import Target, gpu_names, load_targets
from tuner.core.errors import EXIT_FOUND, EXIT_INTERRUPTED, EXIT_NOTHING_FITS, UnavailableError
from tuner.core.expressions import settings_text, show
from tuner.core.units import format_size, significant
from tuner.report.terminal.front import print_front
from tuner.report.terminal.render import echo, print_fields, print_json, say
from tuner.report.terminal.verdict import READ_AS, field_lines, print_lines
from tuner.searches.options import TUNE_TRIALS, Mode, SearchOptions
from tuner.space.gpus import get_gpu

if TYPE_CHECKING:
    from tuner.app.program_front import ProgramFront

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


@subcommand(
    "search",
    "tuner search --space qlora27b --gpu a6000",
    "tuner search --space qlora27b --gpu l40s --where 'lora_rank >= 64'",
    "tuner search --space tiny_cpu --gpu cpu    # real trials, without a GPU",
    "tuner search --space qlora27b --gpu a6000,t4,h100_sxm --address auto",
    "tuner search --space qlora27b --gpu auto --max-cost 2",
)
@opts.space_option()
@opts.gpu_options
@opts.model_option("Model to use instead of the space's.")
@opts.search_options()
@click.option("--quiet", is_flag=True, help="Print the result only.")
@opts.results_option
@opts.json_option
def search(  # noqa: PLR0913 - one argument for each option that is not about how to search
    *,
    space: str,
    gpu_name: str,
    model: str | None,
    gpu_memory: int | None,
    price: float | None,
    results: Path,
    mode: str,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Search a space for the fastest configuration that fits a GPU.

    With a GPU of that type in this machine or cluster, each trial is a short training run in its
    own process; otherwise every number is predicted, and the output says so. Several types (--gpu
    a6000,t4) are searched together and compared, with a budget each. Ctrl-C keeps a valid result;
    the same command continues from it. Exit code 1 if nothing fits.
    """
    targets = load_targets(
        space,
        gpu_names(gpu_name),
        model=model,
        results=results,
        gpu_memory=gpu_memory,
        price=price,
        address=options["address"],
    )
    how = SearchOptions(mode=Mode(mode), **options)
    return run_search(targets, how, as_json=as_json, quiet=quiet)


def run_search(
    targets: Sequence[Target], options: SearchOptions, *, as_json: bool, quiet: bool
) -> int:
    """The whole command; returns its exit code."""
    from tuner.app.cli.listening import Printer
    from tuner.app.search.plan import make_plans  # numpy
    from tuner.app.search.run import SearchedGpu, run_plans

    printer = Printer(err=as_json, quiet=quiet)
    with quiet_libraries():
        plans = make_plans(targets, options)
        found = run_plans(plans, command=shlex.join(["tuner", *opts.typed()]), listener=printer)
    ran = [one for one in found if isinstance(one, SearchedGpu)]
    if len(found) == 1:
        print_searched(ran[0], as_json=as_json)
    else:
        print_all_searched(found, as_json=as_json)
    if any(one.result.interrupted for one in ran):
        return EXIT_INTERRUPTED
    if any(one.view.best for one in ran):
        return EXIT_FOUND
    # A search that broke off does not know that nothing fits.
    failures = [one.result.failure for one in ran if one.result.failure is not None]
    return failures[0].exit_code if failures else EXIT_NOTHING_FITS


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
@opts.emulated_gpu_options
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
@opts.model_option("With --predict: the model, if the program doesn't name it.")
@opts.set_option
@click.option(
    "--space",
    "space_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to write the search space. [default: tune-PROGRAM.yaml]",
)
@opts.margin_option
@click.option("--quiet", is_flag=True, help="Print the result only.")
@opts.results_option
@opts.json_option
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def tune(  # noqa: PLR0913 - one argument for each option
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
