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
from tuner.engine.user_program import WAYS
from tuner.expressions import show
from tuner.gpu import Gpu
from tuner.terminal.render import echo
from tuner.units import format_size


@click.command(
    "apply",
    epilog=examples(
        "tuner apply --space qlora27b --gpu a6000 --to train.py --dry-run",
        "tuner apply --space qlora27b --gpu a6000 --to conf/config.yaml \\",
        "    --map micro_batch=data_loader.batch_size --map optimizer=",
        "tuner apply --space qwen7b_lora --gpu rtx3090 --to config.py -- train.py --epochs 3",
    ),
)
@space_option()
@gpu_options
@model_option("The --model of the search.")
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
    "FILE:KEY; nothing after the = leaves the knob out. Repeatable; replaces the space's mapping "
    "of that knob.",
)
@click.option(
    "--as",
    "targets",
    multiple=True,
    metavar="NAME",
    help="Use only this mapping of those the space names under apply; repeatable.",
)
@click.option(
    "--check",
    "way",
    type=click.Choice(WAYS),
    help="How to check, before writing, that the values reach the training: emulate runs the "
    "changed program for a step, read inspects its files, none skips the check. [default: "
    "emulate where possible, else read]",
)
@click.option("--dry-run", is_flag=True, help="Show the diff and write nothing.")
@click.option("--yes", "-y", is_flag=True, help="Write without asking.")
@results_option
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
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
    way: str | None,
    dry_run: bool,
    yes: bool,
    results: Path,
    program: tuple[str, ...],
) -> None:
    """Write the recommended values into your own configuration files.

    Only values change: comments, order, quotes and line ends stay, byte by byte. The diff is shown
    first, and a dated copy of each file is kept beside it. If a value cannot be written safely, or
    does not reach the training, all such problems are listed and nothing is written (exit code 2).
    PROGRAM, after --, is the script or command that takes its settings from the files; by default
    the file itself.
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
    found = applying(target.space, best, files, targets=targets, maps=maps, words=program)
    plan = found.plan
    _show(found)
    if way != "none":
        _check(found, target.gpu, way)
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
    if found.rest:
        echo("not in these files; set them where your project does:", err=True)
        for text in found.rest:
            echo(f"  {text}", err=True)


def _check(found: Applying, gpu: Gpu, way: str | None) -> None:
    """Say how each value arrives. Raises `InputError` where one does not."""
    from tuner.engine.arriving import look  # numpy, for which no other command need wait

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


def _names(plan: EditPlan) -> str:
    return " and ".join(str(edit.path) for edit in plan.changed)
