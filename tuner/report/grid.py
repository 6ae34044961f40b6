"""A grid of models, GPU types and ways to train, as JSON, CSV and an HTML page.

All its numbers are predicted.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.core.gpu import Gpu
from tuner.core.records import KnobValue, Prediction, Source
from tuner.core.units import GIB, format_duration
from tuner.report.html import all_shown, page_environment
from tuner.report.table import cell, value_text
from tuner.searches.cost import RunCost


@dataclass(frozen=True, slots=True)
class GridMethod:
    """A way to train, and the settings that make it.

    `tolerance` is the share by which the memory of a compiled timeline may be wrong.
    """

    id: str
    title: str
    settings: Mapping[str, KnobValue]
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True)
class GridRun:
    """A configuration of a cell. `settings` are those that are not the defaults.

    `traced` says whether its memory is of a trace at full depth, else of a compiled timeline.
    """

    settings: Mapping[str, KnobValue]
    prediction: Prediction
    cost: RunCost | None
    traced: bool

    def number(self, knob: str) -> int:
        """The value of a knob that is a whole number."""
        return int(str(self.settings[knob]))

    @property
    def tokens(self) -> int:
        """The length of an example in tokens."""
        return self.number("max_length")

    @property
    def micro_batch(self) -> int:
        """Examples of one forward pass."""
        return self.number("micro_batch")

    @property
    def recomputes(self) -> bool:
        """True with gradient checkpointing."""
        return bool(self.settings["gradient_checkpointing"])

    @property
    def device_gib(self) -> float:
        """Peak device memory in GiB."""
        return self.prediction.memory.device_bytes / GIB

    def numbers(self) -> dict[str, Any]:
        """JSON types, units in the names; money and times are None where they are unknown."""
        prediction, cost = self.prediction, self.cost
        return {
            "max_length": self.tokens,
            "micro_batch": self.micro_batch,
            "gradient_checkpointing": self.recomputes,
            "device_bytes": prediction.memory.device_bytes,
            "samples_per_s": prediction.speed.samples_per_s,
            "tokens_per_s": prediction.speed.tokens_per_s,
            "epoch_s": cost.epoch_s if cost else None,
            "epoch_usd": cost.epoch_usd if cost else None,
            "memory_from": "full trace" if self.traced else "compiled timeline",
        }


@dataclass(frozen=True, slots=True)
class GridCell:
    """One model trained in one way on one GPU type.

    `smallest` is the smallest configuration, which may not fit. `longest` has the most tokens
    that fit at a micro-batch of one, `fastest` the most samples a second at the grid's length;
    None where nothing fits. `refused` says why nothing could be predicted, empty where it was.
    """

    model: str
    gpu: str
    method: str
    smallest: GridRun | None = None
    longest: GridRun | None = None
    fastest: GridRun | None = None
    refused: str = ""

    @property
    def remarks(self) -> str:
        """The trace's remarks: its description without the method and the rates."""
        method = self.smallest.prediction.method if self.smallest else ""
        return "; ".join(method.split("; ")[2:])

    def estimate_command(self, run: GridRun) -> str:
        """The command that predicts a run alone, and shows where each GiB goes."""
        words = ["tuner", "estimate", "--model", self.model, "--gpu", self.gpu]
        for name, value in run.settings.items():
            words += ["--set", f"{name}={value_text(value)}"]
        return shlex.join(words)

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        runs = {"smallest": self.smallest, "longest": self.longest, "fastest": self.fastest}
        return {
            "model": self.model,
            "gpu": self.gpu,
            "method": self.method,
            "fits": self.longest is not None,
            "refused": self.refused or None,
            "remarks": self.remarks or None,
            **{
                name: {**run.numbers(), "estimate": self.estimate_command(run)} if run else None
                for name, run in runs.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Grid:
    """All cells, and what they are about. `params` are those of the models, by id."""

    models: tuple[str, ...]
    params: Mapping[str, int | None]
    gpus: tuple[Gpu, ...]
    methods: tuple[GridMethod, ...]
    length: int
    examples: int
    cells: tuple[GridCell, ...]
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "source": str(Source.PREDICTED),
            "length": self.length,
            "examples": self.examples,
            "models": [{"id": name, "params": self.params[name]} for name in self.models],
            "gpus": [
                {
                    "id": gpu.id,
                    "name": gpu.name,
                    "memory_bytes": gpu.memory_bytes,
                    "price_usd_per_hour": gpu.price_usd_per_hour,
                    "price_date": gpu.price_date,
                }
                for gpu in self.gpus
            ],
            "methods": [
                {"id": one.id, "title": one.title, "settings": dict(one.settings)}
                for one in self.methods
            ],
            "cells": [cell.to_dict() for cell in self.cells],
            "versions": dict(self.versions),
        }


_NUMBERS = ("device_gib", "samples_per_s", "tokens_per_s", "epoch_s", "epoch_usd")


def grid_csv(cells: Sequence[GridCell]) -> str:
    """The cells as CSV, one row each; what is unknown is empty."""
    text = io.StringIO(newline="")
    settings = ("fastest_micro_batch", "fastest_gradient_checkpointing")
    numbers = tuple(f"fastest_{name}" for name in _NUMBERS)
    columns = ("model", "gpu", "method", "source", "fits", "smallest_gib", "longest", *settings)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, *numbers, "refused", "remarks"])
    for one in cells:
        writer.writerow([*_csv_row(one), cell(one.refused), cell(one.remarks)])
    return text.getvalue()


def _csv_row(one: GridCell) -> list[object]:
    run = one.fastest
    values = {**run.numbers(), "device_gib": run.device_gib} if run else {}
    shown = (values.get(name) for name in _NUMBERS)
    return [
        cell(one.model),
        one.gpu,
        one.method,
        str(Source.PREDICTED),
        value_text(one.longest is not None),
        f"{one.smallest.device_gib:.2f}" if one.smallest else "",
        one.longest.tokens if one.longest else "",
        run.micro_batch if run else "",
        value_text(run.recomputes) if run else "",
        *("" if number is None else f"{number:.5g}" for number in shown),
    ]


SIZES = ("micro_batch", "max_length", "gradient_checkpointing")
"""Settings that differ between the runs of a cell, shown in their rows."""


def grid_html(grid: Grid) -> str:
    """The page as HTML text. It asks nothing of the network."""
    text: str = (
        page_environment()
        .get_template("grid.html.j2")
        .render(grid=grid, page=page_data(grid), versions=sorted(grid.versions.items()))
    )
    return text


def page_data(grid: Grid) -> dict[str, Any]:
    """The data that the page's program draws: `cells` by model, then GPU type, then method.

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
    """A column's title; its tooltip has the full id."""
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
