"""`tuner search`: tries configurations of a space on a GPU type, and recommends one."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from tuner.app.cli.answers import print_all_searched, print_searched
from tuner.app.cli.options import (
    gpu_options,
    json_option,
    model_option,
    results_option,
    search_options,
    space_option,
    subcommand,
    typed,
)
from tuner.app.listener import quiet_libraries
from tuner.app.target import Target, gpu_names, load_targets
from tuner.core.errors import EXIT_FOUND, EXIT_INTERRUPTED, EXIT_NOTHING_FITS
from tuner.searches.options import Mode, SearchOptions

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


@subcommand(
    "search",
    "tuner search --space qlora27b --gpu a6000",
    "tuner search --space qlora27b --gpu l40s --where 'lora_rank >= 64'",
    "tuner search --space tiny_cpu --gpu cpu    # real trials, without a GPU",
    "tuner search --space qlora27b --gpu a6000,t4,h100_sxm --address auto",
    "tuner search --space qlora27b --gpu auto --max-cost 2",
)
@space_option()
@gpu_options
@model_option("Model to use instead of the space's.")
@search_options()
@click.option("--quiet", is_flag=True, help="Print the result only.")
@results_option
@json_option
def command(  # noqa: PLR0913 - one argument for each option that is not about how to search
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
        found = run_plans(plans, command=shlex.join(["tuner", *typed()]), listener=printer)
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
