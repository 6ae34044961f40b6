"""`tuner export`: the recommendation as the settings of another tool."""

from __future__ import annotations

from pathlib import Path

import click

from tuner.app.cli.options import examples
from tuner.app.cli.target_options import Selected, criteria_options, target_options
from tuner.app.exporting import export_recommended
from tuner.app.recommendation import Criteria, recommended
from tuner.core.errors import InputError, unknown
from tuner.program.export import FORMATS
from tuner.searches.store import write_atomically


@click.command(
    "export",
    epilog=examples(
        "tuner export --space qlora27b --gpu a6000 --format trl --output sft.yaml",
        "tuner export --space qlora27b --gpu a6000 --format command --as scripts",
    ),
)
@target_options("The --model of the search.")
@criteria_options
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
def command(
    *,
    selected: Selected,
    criteria: Criteria,
    name: str,
    output: Path | None,
    maps: tuple[str, ...],
    targets: tuple[str, ...],
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
    target = selected.target()
    best = recommended(target, criteria)
    exported = export_recommended(target, best, name, targets=targets, maps=maps)
    if output is None:
        click.echo(exported.text, nl=False)
    else:
        write_atomically(output, exported.text.encode("utf-8"))
        click.echo(f"wrote {output}", err=True)
    for line in exported.left_out:
        click.echo(f"not said: {line}", err=True)
