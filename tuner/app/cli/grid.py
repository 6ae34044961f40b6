"""`tuner grid`: which models fit which GPU types, how long, how fast and at what price."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from tuner.app.cli import completing
from tuner.app.cli.listening import Printer
from tuner.app.cli.options import json_option, margin_option, set_option, setting_flags, subcommand
from tuner.app.device import find_gpu, with_profile
from tuner.app.listener import quiet_libraries
from tuner.core.errors import InputError, unknown
from tuner.core.records import parse_margin
from tuner.core.units import format_duration, significant
from tuner.report.grid import Grid, GridCell, grid_csv, grid_html
from tuner.report.terminal.render import echo, print_fields, print_json
from tuner.report.terminal.tables import print_rows
from tuner.searches.store import utf8, write_atomically

MOST_ROWS = 60
"""More cells than this are for the page; the terminal counts them."""


@subcommand(
    "grid",
    "tuner grid --out grid.html",
    "tuner grid --model qwen3-8b --gpu rtx4090 --gpu l4",
    "tuner grid --model ./my-model --method qlora --length 8192 --out mine.csv",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="MODEL",
    shell_complete=completing.models,
    help="Model. Can be repeated.  [default: 20 that many people fine-tune]",
)
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="GPU",
    shell_complete=completing.gpus,
    help="GPU type (`tuner gpus`). Can be repeated.  [default: 16 that many people use]",
)
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="METHOD",
    help="qlora, lora or full. Can be repeated.  [default: all three]",
)
@click.option(
    "--length",
    "--seq-len",
    "length",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    metavar="TOKENS",
    help="Length of the examples for which the fastest configuration is found.",
)
@click.option(
    "--examples",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    metavar="NUMBER",
    help="Training examples of an epoch.",
)
@setting_flags("--lora-rank")
@set_option
@margin_option
@click.option(
    "--out",
    "paths",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Page (.html) or table (.csv) to write. Can be repeated.",
)
@json_option
def command(
    *,
    models: tuple[str, ...],
    gpus: tuple[str, ...],
    methods: tuple[str, ...],
    margin: str | None,
    paths: tuple[Path, ...],
    as_json: bool,
    **question: Any,
) -> None:
    """Predict which models fit which GPU types with LoRA, QLoRA and full fine-tuning.

    For each: the most tokens that fit at a micro-batch of one, and the fastest configuration at
    --length. All settings that are not varied are those of `tuner estimate --model`, which shows
    where each GiB of a cell goes.
    """
    _check_paths(paths)
    printer, started_s = Printer(err=True), time.monotonic()

    def tell(model: str, done: int, of: int) -> None:
        if of > 1:
            spent = format_duration(time.monotonic() - started_s)
            printer.say(f"predicted {model}, {done} of {of} models, {spent}")

    with quiet_libraries():
        from tuner.app.grid import (
            GPUS,
            METHODS,
            MODELS,
            GridGpu,
            GridQuestion,
            make_grid,
        )  # numpy
        from tuner.predict.compiling import default_workers

        found = dict.fromkeys(map(find_gpu, gpus or GPUS))
        if missing := [name for name in methods if name not in METHODS]:
            raise unknown("method", missing[0], METHODS)
        asked = GridQuestion(
            models=tuple(dict.fromkeys(models or MODELS)),
            gpus=tuple(
                GridGpu(*with_profile(gpu, printer), parse_margin(margin, gpu)) for gpu in found
            ),
            methods=tuple(METHODS[name] for name in dict.fromkeys(methods or METHODS)),
            **question,
        )
        grid = make_grid(asked, workers=default_workers(), on_model=tell)
    for path in paths:
        _write(path, grid)
    if as_json:
        print_json(grid.to_dict())
    else:
        _print(grid, paths)
    if len(grid.models) < len(asked.models):
        printer.say(f"interrupted: {len(grid.models)} of {len(asked.models)} models are predicted")
        raise KeyboardInterrupt


def _check_paths(paths: tuple[Path, ...]) -> None:
    """Raise `InputError` for a file that could not be written, before anything is predicted."""
    for path in paths:
        if path.suffix not in (".html", ".csv"):
            raise InputError(f"--out {path} is neither a page (.html) nor a table (.csv)")
        if not path.parent.is_dir():
            raise InputError(f"--out {path}: there is no folder {path.parent}")


def _write(path: Path, grid: Grid) -> None:
    text = grid_html(grid) if path.suffix == ".html" else grid_csv(grid.cells)
    write_atomically(path, utf8(text))


def _print(grid: Grid, paths: tuple[Path, ...]) -> None:
    cells = grid.cells
    if len(cells) <= MOST_ROWS:
        numbers = ("longest", "batch", "samples/s", "USD")
        columns = ("model", "GPU", "method", "longest", "batch", "ckpt", "samples/s", "USD")
        print_rows(columns, map(_row, cells), right=numbers)
        echo()
        print_fields([("note", note) for note in dict.fromkeys(map(_note, cells))])
    fitting = sum(cell.longest is not None for cell in cells)
    refused = sum(bool(cell.refused) for cell in cells)
    cannot = f"; {refused:,} cannot run or be predicted" if refused else ""
    shown = next((cell.estimate_command(cell.fastest) for cell in cells if cell.fastest), "")
    print_fields(
        [
            ("longest", "tokens at a micro-batch of one with gradient checkpointing"),
            ("the rest", f"fastest at {grid.length:,} tokens; USD for {grid.examples:,} examples"),
            ("source", "predicted"),
            ("fits", f"{fitting:,} of {len(cells):,} cells{cannot}"),
            ("written", ", ".join(map(str, paths))),
            ("each GiB", shown),
        ]
    )


def _note(cell: GridCell) -> str:
    said = cell.refused or cell.remarks
    return f"{cell.model}, {cell.method}: {said}" if said and not cell.refused else said


def _row(cell: GridCell) -> tuple[str, ...]:
    names, run = (cell.model, cell.gpu, cell.method), cell.fastest
    if cell.refused:
        return (*names, "refused", "", "", "", "")
    longest = f"{cell.longest.tokens:,}" if cell.longest else "-"
    if run is None:
        return (*names, longest, "-", "-", "-", "-")
    usd = run.cost.epoch_usd if run.cost else None
    return (
        *names,
        longest,
        str(run.micro_batch),
        "yes" if run.recomputes else "no",
        significant(run.prediction.speed.samples_per_s),
        "?" if usd is None else f"{usd:,.2f}",
    )
