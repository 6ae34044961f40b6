"""`tuner apply` and `tuner export`: the recommendation in your own files, or another tool's."""

from __future__ import annotations

from pathlib import Path

import click

from tuner.app.applying import applying
from tuner.app.cli.options import subcommand
from tuner.app.cli.target_options import Selected, criteria_options, target_options
from tuner.app.exporting import export_recommended
from tuner.app.recommendation import Criteria, recommended
from tuner.core.errors import InputError, unknown
from tuner.core.units import format_size
from tuner.program.export import FORMATS
from tuner.report.terminal.render import echo
from tuner.searches.store import write_atomically


@subcommand(
    "apply",
    "tuner apply --space qlora27b --gpu a6000 train.py",
    "tuner apply --space dynamo_t4 --gpu t4 --yes config.yaml",
    "tuner apply --space qlora4b --gpu a6000 -- torchrun train.py --epochs 3",
)
@target_options()
@criteria_options
@click.option("--yes", "-y", is_flag=True, help="Write without asking.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def apply(*, selected: Selected, criteria: Criteria, yes: bool, program: tuple[str, ...]) -> None:
    """Write the recommended values into the files of PROGRAM.

    PROGRAM is your script, its command, or its settings files. A value is changed where the
    program takes it from, or at the key that the space names under apply; every other byte stays.
    The diff is shown first, and a dated copy of each file is kept beside it.
    """
    target = selected.target()
    best = recommended(target, criteria)
    echo(
        f"{target.space.name} on {target.gpu.name}: trial {best.record.trial_id} ({best.source})",
        err=True,
    )
    if best.limit_text:
        used_bytes = best.evidence.memory.device_bytes
        sizes = f"{format_size(used_bytes)} of {format_size(best.memory_bytes)}"
        echo(f"fits: {sizes} {best.limit_text}", err=True)
    found = applying(target.space, best.configuration, program)
    echo(found.change.difference, nl=False)
    for text in found.refused:
        echo(f"not written: {text}", err=True)
    if found.lacking:
        echo(f"not set by the program: {', '.join(found.lacking)}", err=True)
    for note in found.notes:
        echo(f"note: {note}", err=True)
    made = found.change
    files = " and ".join(map(str, made.files))
    if not files:
        is_same = made.before.command == made.after.command
        echo("nothing changes" if is_same else "only the command changes", err=True)
    elif yes or click.confirm(f"Write {files}?", err=True):
        for path, backup in made.write().items():
            echo(f"wrote {path}; as it was: {backup}", err=True)
    else:
        echo("nothing was written", err=True)


@subcommand(
    "export",
    "tuner export --space qlora27b --gpu a6000 --format trl --output sft.yaml",
    "tuner export --space cot8b_h100 --gpu h100_sxm --format command",
)
@target_options()
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
def export(
    *,
    selected: Selected,
    criteria: Criteria,
    name: str,
    output: Path | None,
) -> None:
    """Print the recommended configuration as the settings of another tool.

    Settings that the tool does not have are named in a comment and on stderr.
    """
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    if output is not None and output.exists():
        raise InputError(f"{str(output)!r} is there already", hint="name another file")
    target = selected.target()
    best = recommended(target, criteria)
    exported = export_recommended(target, best, name)
    if output is None:
        click.echo(exported.text, nl=False)
    else:
        write_atomically(output, exported.text.encode("utf-8"))
        echo(f"wrote {output}", err=True)
    for line in exported.left_out:
        echo(f"not said: {line}", err=True)
