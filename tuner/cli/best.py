"""`tuner best`: the recommendation, read from the journal of a search."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from tuner.cli.options import (
    SizeType,
    examples,
    gpu_options,
    json_option,
    model_option,
    parse_margin,
    results_option,
    space_option,
    where_option,
)


@click.command(
    "best",
    short_help="Print the recommendation of a search.",
    epilog=examples(
        "tuner best --space qlora27b --gpu a6000 --headroom 10%",
    ),
)
@space_option()
@gpu_options
@model_option("The model that --model of the search named.")
@where_option
@click.option("--max-memory", type=SizeType(), metavar="SIZE", help="Use no more than this.")
@click.option(
    "--headroom",
    metavar="SHARE",
    help="Memory to keep free, such as 10% or 4GiB, in place of the search's margin.",
)
@results_option
@json_option
def command(  # noqa: PLR0913 - one argument for each option
    *,
    space_name: str,
    gpu_name: str,
    gpu_memory: int | None,
    price: float | None,
    model: str | None,
    where: tuple[str, ...],
    max_memory: int | None,
    headroom: str | None,
    results: Path,
    as_json: bool,
) -> None:
    """Print the fastest configuration that fits, from a search that was run.

    Exit code 1 when nothing that was tried fits.
    """
    from tuner.cli.answers import nothing_fits_error, print_recommendation
    from tuner.cli.render import print_json
    from tuner.cli.target import check_conditions, load_target, require_records, with_margin
    from tuner.results.best import recommend
    from tuner.results.journal import latest

    target = load_target(
        space_name, gpu_name, model=model, results=results, gpu_memory=gpu_memory, price=price
    )
    conditions = check_conditions(target, where)
    share = parse_margin(headroom, target.gpu, what="headroom")
    records = latest(require_records(target))
    if share is not None:
        margin = round(target.gpu.memory_bytes * share)
        records = tuple(with_margin(record, margin) for record in records)
    allowed = target.gpu
    if max_memory is not None:
        allowed = dataclasses.replace(
            allowed, memory_bytes=min(max_memory, target.gpu.memory_bytes)
        )
    best = recommend(
        records,
        target.facts,
        allowed,
        where=lambda configuration: target.space.matches(configuration, where),
        conditions=conditions,
    )
    if best is None:
        met = [r for r in records if target.space.matches(r.configuration, where)]
        raise nothing_fits_error(dataclasses.replace(target, gpu=allowed), met, conditions)
    if as_json:
        print_json(best.to_dict())
        return
    click.echo(f"{target.space.name} on {target.gpu.name}: {target.space.model}")
    print_recommendation(best)
