"""`tuner search`: tries configurations of a space on a GPU type, and recommends one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from tuner.app.cli.answers import print_all_searched, print_searched
from tuner.app.cli.dry_run import dry_run
from tuner.app.cli.listening import Printer
from tuner.app.cli.options import (
    AmountType,
    DurationType,
    MemoryLimitType,
    RareOption,
    ShareType,
    examples,
    gpu_options,
    json_option,
    measure_options,
    model_option,
    objective_option,
    results_option,
    set_option,
    space_option,
    where_option,
)
from tuner.app.listener import quiet_libraries
from tuner.app.measuring import Mode
from tuner.app.search.plan import SearchOptions, make_plans
from tuner.app.search.run import SearchedGpu, run_plans
from tuner.app.target import Target
from tuner.app.targets import gpu_names, load_targets
from tuner.core.errors import EXIT_FOUND, EXIT_INTERRUPTED, EXIT_NOTHING_FITS
from tuner.searches.request import DEFAULT_SEARCHER, DEFAULT_TRIALS, SEARCHERS, check_searcher
from tuner.space import parse_settings

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


class SearcherType(click.ParamType[str]):
    """The name of a searcher, or of a class of samplers."""

    name = "searcher"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> str:
        """The name itself. Raises `InputError` for one that is unknown."""
        check_searcher(value)
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The searchers that have a name of their own."""
        return [CompletionItem(name) for name in SEARCHERS if name.startswith(incomplete)]


def _search_options(function: _Decorated) -> _Decorated:
    """Options that only `tuner search` has."""
    for option in (
        click.option(
            "--memory-limit", cls=RareOption, type=MemoryLimitType(), metavar="SIZE",
            help="Memory that a real trial may use, such as 24GiB, if a larger GPU stands in; "
            "auto: that of --gpu.",
        ),
        click.option(
            "--mode", cls=RareOption, type=click.Choice([str(mode) for mode in Mode]),
            default="auto", show_default=True,
            help="measure: run trials on a GPU; emulate: run them on an emulated one; predict: "
            "run none; auto: measure if there is such a GPU, else predict.",
        ),
        click.option(
            "--address", metavar="ADDRESS",
            help="Ray cluster address.  [default: start a local one]",
        ),
        click.option("--quiet", is_flag=True, help="Print the result only."),
        click.option(
            "--fresh", cls=RareOption, is_flag=True,
            help="Run known trials again; keep the old journal.",
        ),
        click.option(
            "--workers", cls=RareOption, type=click.IntRange(1), metavar="N",
            help="Trials at once. [default: GPUs, or CPUs]",
        ),
        click.option(
            "--searcher", cls=RareOption, type=SearcherType(), metavar="NAME",
            default=DEFAULT_SEARCHER, show_default=True,
            help=f"Search strategy: {', '.join(SEARCHERS)}, or package.module:Class of an Optuna "
            "sampler.",
        ),
        click.option(
            "--study", cls=RareOption, metavar="FILE",
            type=click.Path(path_type=Path, dir_okay=True),
            help="Also keep the Optuna study in a file, for optuna-dashboard.",
        ),
        click.option(
            "--track", cls=RareOption, multiple=True, metavar="TOOL:PLACE",
            help="Track trials as runs: tensorboard:FOLDER, mlflow:FOLDER or mlflow:URI.",
        ),
        click.option(
            "--dashboard", cls=RareOption, is_flag=True,
            help="Start Ray's dashboard on this machine and print its address.",
        ),
        click.option(
            "--metrics-port", cls=RareOption, type=click.IntRange(0, 65535), metavar="PORT",
            help="Serve metrics for Prometheus on this port of localhost; 0: any.",
        ),
        click.option(
            "--dry-run", is_flag=True,
            help="Show what would run and at what cost; run nothing.",
        ),
        click.option(
            "--no-verify", "verify", cls=RareOption, is_flag=True, default=True, flag_value=False,
            help="Skip the verification run of the recommendation.",
        ),
        click.option("--margin", metavar="SHARE", help="Memory to keep free. [default: 3%]"),
        click.option(
            "--min-gain", type=ShareType(), metavar="SHARE",
            help="Stop when the expected improvement falls below this, e.g. 1%.",
        ),
        click.option(
            "--max-cost", "max_cost_usd", type=AmountType(), metavar="USD",
            help="Limit on the cost of the trials' GPU time.",
        ),
        click.option(
            "--gpu-hours", type=AmountType(), metavar="HOURS",
            help="Limit on the trials' GPU time, known trials included.",
        ),
        click.option(
            "--time-limit", "time_limit_s", type=DurationType(), metavar="TIME",
            help="Limit on the search, such as 90s, 5min or 1h.",
        ),
        click.option(
            "--seed", cls=RareOption, type=click.IntRange(0), default=0, show_default=True,
            metavar="N", help="Random seed of the search and its trials.",
        ),
        click.option(
            "--trials", type=click.IntRange(1), default=DEFAULT_TRIALS,
            metavar="N",
            help="Max. number of trials (in predict mode: full-depth traces), including earlier "
            f"ones.  [default: {DEFAULT_TRIALS}]",
        ),
    ):  # fmt: skip
        function = option(function)
    return function


@click.command(
    "search",
    epilog=examples(
        "tuner search --space qlora27b --gpu a6000",
        "tuner search --space qlora27b --gpu l40s --where 'lora_rank >= 64'",
        "tuner search --space tiny_cpu --gpu cpu    # real trials, without a GPU",
        "tuner search --space qlora27b --gpu a6000,t4,h100_sxm --address auto",
        "tuner search --space qlora27b --gpu auto --max-cost 2 --dry-run",
    ),
)
@space_option()
@gpu_options
@model_option("Model to use instead of the space's.")
@_search_options
@measure_options
@where_option
@objective_option
@set_option
@results_option
@json_option
def command(  # noqa: PLR0913 - one argument for each option that is not about how to search
    *,
    space_name: str,
    gpu_name: str,
    model: str | None,
    gpu_memory: int | None,
    price: float | None,
    results: Path,
    mode: str,
    settings: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    dry_run: bool,
    **options: Any,
) -> int:
    """Search a space for the fastest configuration that fits a GPU.

    With a GPU of that type in this machine or cluster, each trial is a short training run in its
    own process; otherwise every number is predicted, and the output says so. Several types (--gpu
    a6000,t4) are searched together and compared, with a budget each. Ctrl-C keeps a valid result;
    the same command continues from it. Exit code 1 if nothing fits.
    """
    targets = load_targets(
        space_name,
        gpu_names(gpu_name),
        model=model,
        results=results,
        gpu_memory=gpu_memory,
        price=price,
        address=options["address"],
    )
    how = SearchOptions(mode=Mode(mode), settings=parse_settings(settings), **options)
    return run_search(targets, how, as_json=as_json, quiet=quiet, dry=dry_run)


def run_search(
    targets: Sequence[Target], options: SearchOptions, *, as_json: bool, quiet: bool, dry: bool
) -> int:
    """The whole command; returns its exit code."""
    printer = Printer(err=as_json, quiet=quiet)
    with quiet_libraries():
        plans = make_plans(targets, options, printer)
        if dry:
            return dry_run(plans, printer, as_json=as_json)
        found = run_plans(plans, command=_command_line(), listener=printer)
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


def _command_line() -> str:
    """The typed command line, for the report."""
    context = click.get_current_context(silent=True)
    arguments = context.find_root().obj if context is not None else None
    return shlex.join(["tuner", *(arguments or sys.argv[1:])])
