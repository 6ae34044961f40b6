"""How a prediction of a training in stages is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tuner.cli.render import print_fields
from tuner.units import format_duration, format_size, significant

if TYPE_CHECKING:
    from tuner.estimate.stages import StagedPrediction


def print_stages(staged: StagedPrediction) -> None:
    """Every stage with its memory and speed; which one limits, and how long they take."""
    click.echo("\nstages (predicted)")
    rows = []
    for name, prediction in staged.stages.items():
        notes = [
            format_size(prediction.memory.device_bytes),
            f"{significant(prediction.speed.samples_per_s)} samples/s",
        ]
        if not prediction.fits:
            notes.append("does not fit")
        elif name == staged.limiting:
            notes.append("needs most")
        rows.append((name, ", ".join(notes)))
    if staged.epoch_s is not None:
        rows.append(("one epoch of each", format_duration(staged.epoch_s)))
    if staged.run_s is not None and staged.run_s != staged.epoch_s:
        rows.append(("all epochs", format_duration(staged.run_s)))
    print_fields(rows, indent=2)


def staged_to_dict(staged: StagedPrediction) -> dict[str, Any]:
    """The stages as JSON types."""
    return {
        "limiting_stage": staged.limiting,
        "misfits": list(staged.misfits),
        "epoch_s": staged.epoch_s,
        "run_s": staged.run_s,
        "stages": {name: prediction.to_dict() for name, prediction in staged.stages.items()},
    }
