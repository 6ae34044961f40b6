"""`tuner best`: the recommendation, read from the journal of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tuner.cli.answers import print_recommendation, use_commands
from tuner.cli.every_gpu import print_answers
from tuner.cli.options import (
    choice_options,
    examples,
    gpu_options,
    json_option,
    model_option,
    results_option,
    space_option,
)
from tuner.engine.gpus_compared import answers
from tuner.engine.recommendation import recommended
from tuner.engine.targets import ALL, named_targets
from tuner.terminal.render import echo, print_json


@click.command(
    "best",
    epilog=examples(
        "tuner best --space qlora27b --gpu a6000 --headroom 10%",
        "tuner best --space qlora27b --gpu all    # which GPU is cheapest per epoch?",
    ),
)
@space_option()
@gpu_options
@model_option("The --model of the search.")
@choice_options
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
    objectives: tuple[str, ...],
    results: Path,
    as_json: bool,
) -> None:
    """Print the fastest configuration that fits, from a finished search.

    --gpu all compares every searched GPU type, --gpu a6000,t4 the named ones. Exit code 1 if
    nothing tried fits.
    """
    choice: dict[str, Any] = {
        "headroom": headroom,
        "max_memory": max_memory,
        "objectives": objectives,
    }
    targets = named_targets(
        space_name, gpu_name, model=model, results=results, gpu_memory=gpu_memory, price=price
    )
    if gpu_name == ALL or "," in gpu_name:
        print_answers(
            answers(targets, lambda target: recommended(target, where, **choice)), as_json=as_json
        )
        return
    target = targets[0]
    best = recommended(target, where, **choice)
    use = use_commands(target, where=where, **choice)
    if as_json:
        print_json({**best.to_dict(), "use": list(use)})
        return
    echo(f"{target.space.name} on {target.gpu.name}: {target.space.subject_of(best.configuration)}")
    if target.known != target.folder:
        echo("from the results that come with tuner; nothing was searched here")
    print_recommendation(best, use=use)
