"""`tuner apply` and `tuner export`: the recommendation in your own files, or another tool's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tuner.app.applying import WAYS, Applying, applying
from tuner.app.cli.options import subcommand
from tuner.app.cli.target_options import Selected, criteria_options, target_options
from tuner.app.exporting import export_recommended
from tuner.app.recommendation import Criteria, recommended
from tuner.core.errors import InputError, unknown
from tuner.core.expressions import show
from tuner.core.gpu import Gpu
from tuner.core.units import format_size
from tuner.program.export import FORMATS
from tuner.report.terminal.render import echo
from tuner.searches.store import write_atomically


@subcommand(
    "apply",
    "tuner apply --space qlora27b --gpu a6000 --to train.py --dry-run",
    "tuner apply --space qlora27b --gpu a6000 --to conf/config.yaml \\",
    "    --map micro_batch=data_loader.batch_size --map optimizer=",
    "tuner apply --space qwen7b_lora --gpu rtx3090 --to config.py \\",
    "    -- train.py --epochs 3",
)
@target_options()
@criteria_options
@click.option(
    "--to",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    metavar="FILE",
    help="YAML, JSON, TOML or Python file to change. Can be repeated.",
)
@click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="KNOB=KEY",
    help="Where a value belongs: a key such as train.batch_size, .batch_size (anywhere) or "
    "FILE:KEY; empty leaves the parameter out. Replaces the space's mapping. Can be repeated.",
)
@click.option(
    "--as",
    "targets",
    multiple=True,
    metavar="NAME",
    help="Use only this mapping of those the space names under apply. Can be repeated.",
)
@click.option(
    "--check",
    "way",
    type=click.Choice(WAYS),
    metavar="WAY",
    help="Check that values reach the training: emulate a step of the changed program, read its "
    "files, or none.  [default: emulate where possible, else read]",
)
@click.option("--force-model", is_flag=True, help="Write into files that train another model.")
@click.option("--dry-run", is_flag=True, help="Show the diff and write nothing.")
@click.option("--yes", "-y", is_flag=True, help="Write without asking.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def apply(
    *,
    selected: Selected,
    criteria: Criteria,
    files: tuple[Path, ...],
    way: str | None,
    dry_run: bool,
    yes: bool,
    program: tuple[str, ...],
    **how: Any,
) -> None:
    """Write the recommended values into your own configuration files.

    Only values change: comments, order, quotes and line ends stay, byte by byte. The diff is shown
    first, and a dated copy of each file is kept beside it. If a value cannot be written safely or
    does not reach the training, or if the files train another model, nothing is written (exit
    code 2). PROGRAM is the script or command that reads the files; by default the file itself.
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
    found = applying(target.space, best, files, words=program, **how)
    plan = found.plan
    _print_difference(found)
    if way != "none":
        _print_arrivals(found, target.gpu, way)
    if dry_run or not plan.changed:
        return
    names = " and ".join(str(edit.path) for edit in plan.changed)
    if yes or click.confirm(f"Write {names}?", err=True):
        for path, backup in found.write().items():
            echo(f"wrote {path}; as it was: {backup}", err=True)
    else:
        echo("nothing was written", err=True)


def _print_difference(found: Applying) -> None:
    """The difference on stdout; on stderr what stays, and what no file has a key for."""
    echo(found.difference, nl=False)
    for edit in found.plan.files:
        if edit.before == edit.after:
            kept = f"has all {edit.kept} values already" if edit.kept else "has none of the keys"
            echo(f"{edit.path}: {kept}", err=True)
    if found.rest:
        echo("not in these files; set them where your project does:", err=True)
        for text in found.rest:
            echo(f"  {text}", err=True)


def _print_arrivals(found: Applying, gpu: Gpu, way: str | None) -> None:
    """Say how each value arrives. Raises `InputError` where one does not."""
    from tuner.app.arriving import look  # numpy, for which no other command need wait

    arrivals = look(found.user, found.plan.files, found.wanted, gpu, way=way)
    for note in (*found.plan.notes, *arrivals.notes):
        echo(f"note: {note}", err=True)
    arrivals.require()
    seen: dict[str, list[str]] = {}
    for value in arrivals.values:
        seen.setdefault(value.seen, []).append(f"{value.knob}={show(value.wanted)}")
    for how, texts in seen.items():
        if how:
            echo(f"arrives ({how}): {' '.join(texts)}", err=True)
    if "" in seen:
        echo(f"not seen to arrive: {' '.join(seen[''])}", err=True)


@subcommand(
    "export",
    "tuner export --space qlora27b --gpu a6000 --format trl --output sft.yaml",
    "tuner export --space qlora27b --gpu a6000 --format command --as scripts",
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
@click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="KNOB=FLAG",
    help="Name of a flag, for --format command. Can be repeated.",
)
@click.option(
    "--as",
    "targets",
    multiple=True,
    metavar="NAME",
    help="Mapping under apply in the space that names the flags, for --format command.",
)
def export(
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
        echo(f"wrote {output}", err=True)
    for line in exported.left_out:
        echo(f"not said: {line}", err=True)
