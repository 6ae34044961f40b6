"""A grid of models, GPU types and ways to train: what fits, how long, how fast, at what price.

Everything in it is predicted.
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
from tuner.core.units import GIB
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
        """Whether activations are computed again in the backward pass."""
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
        """What the trace says of itself, after how it was made and the rates."""
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
