"""The page of a grid: one HTML file, filtered and sorted in the browser."""

from __future__ import annotations

from typing import Any

from tuner.core.gpu import Gpu
from tuner.core.units import GIB, format_duration
from tuner.report.grid import Grid, GridCell, GridRun
from tuner.report.html import all_shown, page_environment
from tuner.report.table import value_text

SIZES = ("micro_batch", "max_length", "gradient_checkpointing")
"""What differs between the runs of a cell, and stands in their rows."""


def grid_html(grid: Grid) -> str:
    """The page as HTML text. It asks nothing of the network."""
    text: str = (
        page_environment()
        .get_template("grid.html.j2")
        .render(grid=grid, page=page_data(grid), versions=sorted(grid.versions.items()))
    )
    return text


def page_data(grid: Grid) -> dict[str, Any]:
    """What the page's program draws: `cells` by model, then GPU type, then method.

    Texts that many cells share stand once in `texts`, and cells have their places.
    """
    texts: dict[str, int] = {"": 0}
    cells = [_cell(cell, texts) for cell in grid.cells]
    page: dict[str, Any] = all_shown(
        {
            "length": grid.length,
            "examples": grid.examples,
            "models": [[name, grid.params[name]] for name in grid.models],
            "gpus": [
                [gpu.id, _short(gpu), round(gpu.memory_bytes / GIB, 1), gpu.price_usd_per_hour]
                for gpu in grid.gpus
            ],
            "methods": [[one.id, one.title] for one in grid.methods],
            "texts": list(texts),
            "cells": cells,
        }
    )
    return page


def _short(gpu: Gpu) -> str:
    """What stands over a column; the id beside it in a tooltip leaves nothing open."""
    words = gpu.name.split()
    return " ".join(w for w in words if w not in ("NVIDIA", "GeForce", "Blackwell", "Edition"))


def _cell(cell: GridCell, texts: dict[str, int]) -> list[object]:
    """Why refused, remarks, settings, GiB of the smallest, and the longest and fastest run."""

    def place(text: str) -> int:
        return texts.setdefault(text, len(texts))

    settings = cell.smallest.settings if cell.smallest else {}
    shared = [f"{k}={value_text(v)}" for k, v in settings.items() if k not in SIZES]
    return [
        place(cell.refused),
        place(cell.remarks),
        place(" ".join(f"--set {one}" for one in shared)),
        round(cell.smallest.device_gib, 1) if cell.smallest else None,
        _run(cell.longest),
        _run(cell.fastest),
    ]


def _run(run: GridRun | None) -> list[object] | None:
    """Tokens, micro-batch, checkpointing, GiB, samples a second, an epoch's time and price."""
    if run is None:
        return None
    return [
        run.tokens,
        run.micro_batch,
        int(run.recomputes),
        round(run.device_gib, 1),
        float(f"{run.prediction.speed.samples_per_s:.3g}"),
        format_duration(run.cost.epoch_s) if run.cost else "",
        float(f"{run.cost.epoch_usd:.3g}") if run.cost and run.cost.epoch_usd is not None else None,
        int(run.traced),
    ]
