"""Writes docs/notebook/reported_runs.md: every reported run against its prediction.

    python -m benchmarks.reported_runs

Reads benchmarks/reported_runs.jsonl, which `tuner report-run` makes lines for. Nothing is computed:
the predictions are those that were made before the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tuner.core.units import format_duration, format_size
from tuner.report.prediction_error import QUANTITIES

ROWS = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).resolve().parents[1] / "docs/notebook/reported_runs.md"

INTRODUCTION = """\
# Reported runs

Written by `python -m benchmarks.reported_runs` from `benchmarks/reported_runs.jsonl`: runs that
were *measured*, each beside what was *predicted* before it ran. `tuner report-run --space S
--gpu G` prints the lines of your own trials, without anything private; a pull request adds them.
"""
_SHOWN = (
    "precision",
    "lora_rank",
    "micro_batch",
    "grad_accum",
    "max_length",
    "optimizer",
    "attention",
    "gradient_checkpointing",
)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page([json.loads(line) for line in ROWS.read_text().splitlines()]))


def page(rows: list[Mapping[str, Any]]) -> str:
    """The text of the page."""
    parts = [INTRODUCTION, _summary(rows), ""]
    parts += [
        "| model | device | settings | memory, measured | predicted | step, measured | predicted |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    parts += [_line(row) for row in rows]
    return "\n".join(parts) + "\n"


def _summary(rows: list[Mapping[str, Any]]) -> str:
    told = []
    for quantity in QUANTITIES:
        errors = [
            abs(row["predicted"][quantity.name] / row["measured"][quantity.name] - 1)
            for row in rows
        ]
        told.append(f"{quantity.label} {median(errors):.1%}")
    models = len({row["model"] for row in rows})
    devices = len({row["device"] for row in rows})
    return (
        f"{len(rows)} runs of {models} model{'s' * (models > 1)} on {devices} "
        f"device{'s' * (devices > 1)}. Median error: {', '.join(told)}."
    )


def _line(row: Mapping[str, Any]) -> str:
    measured, predicted = row["measured"], row["predicted"]
    settings = " ".join(
        f"{name}={row['configuration'][name]}" for name in _SHOWN if name in row["configuration"]
    )
    cells = [row["model"], row["device"], settings]
    for name, text in (("device_bytes", format_size), ("step_s", format_duration)):
        change = predicted[name] / measured[name] - 1
        cells += [text(measured[name]), f"{text(predicted[name])} ({change:+.1%})"]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
