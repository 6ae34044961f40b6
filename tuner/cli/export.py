"""`tuner export`: the recommendation as the settings of another tool."""

from __future__ import annotations

from pathlib import Path

import click

from tuner.cli.options import (
    choice_options,
    examples,
    gpu_options,
    model_option,
    results_option,
    space_option,
)
from tuner.engine.exporting import export_recommended
from tuner.engine.recommendation import recommended
from tuner.engine.target import load_target
from tuner.errors import InputError, unknown
from tuner.export import FORMATS
from tuner.results.store import write_atomically


@click.command(
    "export",
    epilog=examples(
        "tuner export --space qlora27b --gpu a6000 --format trl --output sft.yaml",
        "tuner export --space qlora27b --gpu a6000 --format command --as scripts",
    ),
)
@space_option()
@gpu_options
@model_option("The --model of the search.")
@choice_options
@click.option(
    "--format",
    "name",
    required=True,
    metavar="NAME",
    help=f"One of {', '.join(FORMATS)}.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="New file to write.  [default: print]",
)
@click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="KNOB=FLAG",
    help="Name of a flag, for --format command; repeatable.",
)
@click.option(
    "--as",
    "targets",
    multiple=True,
    metavar="NAME",
    help="Mapping under apply in the space that names the flags, for --format command.",
)
@results_option
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
    name: str,
    output: Path | None,
    maps: tuple[str, ...],
    targets: tuple[str, ...],
    results: Path,
) -> None:
    """Print the recommended configuration as the settings of another tool.

    Settings that the tool does not have are named in a comment and on stderr.
    """
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    if name != "command" and (maps or targets):
        raise InputError("--map and --as name the flags of --format command", hint="leave them out")
    if output is not None and output.exists():
        raise InputError(f"{str(output)!r} is there already", hint="name another file")
    target = load_target(
        space_name, gpu_name, model=model, results=results, gpu_memory=gpu_memory, price=price
    )
    best = recommended(
        target, where, headroom=headroom, max_memory=max_memory, objectives=objectives
    )
    exported = export_recommended(target, best, name, targets=targets, maps=maps)
    if output is None:
        click.echo(exported.text, nl=False)
    else:
        write_atomically(output, exported.text.encode("utf-8"))
        click.echo(f"wrote {output}", err=True)
    for line in exported.left_out:
        click.echo(f"not said: {line}", err=True)
