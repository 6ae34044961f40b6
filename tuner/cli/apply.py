"""`tuner apply`: the recommended values into the user's own configuration files."""

from __future__ import annotations

from pathlib import Path

import click

from tuner.apply.plan import EditPlan
from tuner.cli.options import (
    choice_options,
    examples,
    gpu_options,
    model_option,
    results_option,
    space_option,
)
from tuner.engine.applying import Applying, applying
from tuner.engine.recommendation import recommended
from tuner.engine.target import load_target
from tuner.terminal.render import echo
from tuner.units import format_size


@click.command(
    "apply",
    epilog=examples(
        "tuner apply --space qlora27b --gpu a6000 --to train.py --dry-run",
        "tuner apply --space qlora27b --gpu a6000 --to conf/config.yaml \\",
        "    --map micro_batch=data_loader.batch_size --map optimizer=",
    ),
)
@space_option()
@gpu_options
@model_option("The model that --model of the search named.")
@choice_options
@click.option(
    "--to",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    metavar="FILE",
    help="YAML, JSON, TOML or Python file to change; repeatable.",
)
@click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="KNOB=KEY",
    help="Where a value belongs: a key such as train.batch_size, .batch_size (anywhere) or "
    "FILE:KEY; nothing after the = leaves the knob out. Repeatable; it replaces what the space "
    "says of that knob.",
)
@click.option(
    "--as",
    "targets",
    multiple=True,
    metavar="NAME",
    help="Use only this one of the mappings that the space names under apply; repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Show what would change, and write nothing.")
@click.option("--yes", "-y", is_flag=True, help="Write without asking.")
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
    files: tuple[Path, ...],
    maps: tuple[str, ...],
    targets: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    results: Path,
) -> None:
    """Write the recommended values into your own configuration files.

    Only the values change: comments, order, quotes and line ends stay as they are, byte by
    byte. The difference is shown first, and a dated copy of each file is kept beside it. What
    cannot be written safely is said, all at once, and then nothing is written (exit code 2).
    """
    target = load_target(
        space_name, gpu_name, model=model, results=results, gpu_memory=gpu_memory, price=price
    )
    best = recommended(
        target, where, headroom=headroom, max_memory=max_memory, objectives=objectives
    )
    echo(
        f"{target.space.name} on {target.gpu.name}: trial {best.record.trial_id} ({best.source})",
        err=True,
    )
    if best.limit_text:
        used_bytes = best.evidence.memory.device_bytes
        sizes = f"{format_size(used_bytes)} of {format_size(best.memory_bytes)}"
        echo(f"fits: {sizes} {best.limit_text}", err=True)
    found = applying(target.space, best, files, targets=targets, maps=maps)
    plan = found.plan
    _show(found)
    if dry_run or not plan.changed:
        return
    if yes or click.confirm(f"Write {_names(plan)}?", err=True):
        for path, backup in found.write().items():
            echo(f"wrote {path}; as it was: {backup}", err=True)
    else:
        echo("nothing was written", err=True)


def _show(found: Applying) -> None:
    """The difference on stdout; on stderr what stays, and what no file has a key for."""
    echo(found.difference, nl=False)
    for edit in found.plan.files:
        if edit.before == edit.after:
            kept = f"has all {edit.kept} values already" if edit.kept else "has none of the keys"
            echo(f"{edit.path}: {kept}", err=True)
    if found.note:
        echo(found.note, err=True)
    if found.rest:
        echo("not in these files, so set it where your project does:", err=True)
        for text in found.rest:
            echo(f"  {text}", err=True)


def _names(plan: EditPlan) -> str:
    return " and ".join(str(edit.path) for edit in plan.changed)
