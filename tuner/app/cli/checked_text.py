"""The answer of `tuner check`, printed and as JSON."""

from __future__ import annotations

import shlex
from typing import Any

from tuner.app.checking import BetterChange, CheckedProgram
from tuner.app.cli.emulated_text import print_emulation, print_last_lines
from tuner.app.program_oracle import PredictedProgram
from tuner.core.expressions import show
from tuner.core.units import format_duration, format_size
from tuner.emulator.emulation import Emulation
from tuner.report.terminal.evidence import print_evidence
from tuner.report.terminal.render import echo, print_fields, settings_text
from tuner.space.gpus import load_catalogue


def print_checked(checked: CheckedProgram) -> None:
    """The answer of the program as it is, and below it the change."""
    found, needed = checked.found, checked.needed
    if not isinstance(found, Emulation):
        print_predicted(found)
    elif isinstance(needed, Emulation) and needed.fits is not None:
        print_emulation(needed, refused=found)
    else:
        print_emulation(found)
    if checked.found.ended in ("error", "crash"):
        print_last_lines(checked.log_tail)
    echo()
    for knob, written, arrived in checked.ignored:
        setting = checked.settings[knob]
        echo(
            f"{setting.where}: {setting.name} is {show(written)}, and {show(arrived)} is what the "
            "training has"
        )
    if checked.suggestion is not None:
        _print_suggestion(checked, checked.suggestion)
    elif checked.found.fits is False or checked.needed is not None:
        _print_nothing_fits(checked)
    elif checked.runs > 1:
        echo("Nothing faster was found with the same effective batch, adapters and lengths.")
    for note in checked.notes:
        echo(f"note: {note}")
    what = "run" if checked.source == "emulated" else "prediction"
    number = f"{checked.runs} {what}{'s' * (checked.runs != 1)}"
    echo(f"{checked.source}, in {number}; nothing was written")


def _print_suggestion(checked: CheckedProgram, found: BetterChange) -> None:
    fits = bool(checked.found.fits)
    values = " ".join(f"{name}={show(value)}" for name, value in found.change.values.items())
    title = "Faster, and it fits" if fits else "This change fits"
    echo(f"{title}, with the same effective batch, adapters and lengths: {values}")
    limit = found.found.gpu.memory_bytes
    text = f"{format_size(found.found.used_bytes)} of {format_size(limit)}"
    speed = "" if found.step_s is None else f"{format_duration(found.step_s)} an optimizer step"
    if found.step_s is not None and found.speedup is not None and fits:
        speed += f", {found.speedup:.2f} times as fast as now"
    print_fields([("memory", f"{text}, {checked.source}"), ("speed", speed)], indent=2)
    echo()
    echo(found.change.difference, nl=False)
    echo()


def _print_nothing_fits(checked: CheckedProgram) -> None:
    if checked.least_bytes is None:
        return  # no change was tried
    echo("No change tried with the same effective batch, adapters and lengths fits.")
    margin = checked.found.margin_bytes / checked.found.gpu.memory_bytes
    larger = sorted(
        (
            gpu
            for gpu in load_catalogue().values()
            if gpu.memory_bytes * (1 - margin) >= checked.least_bytes
        ),
        key=lambda gpu: gpu.memory_bytes,
    )
    names = ", ".join(gpu.id for gpu in larger[:3])
    where = f": {names} would have room" if names else ""
    echo(f"The smallest takes {format_size(checked.least_bytes)}{where}.")


def checked_to_dict(checked: CheckedProgram) -> dict[str, Any]:
    """The answer as JSON types; `source` says what every number in it is."""
    found = checked.suggestion
    return {
        "source": checked.source,
        "fits": checked.found.fits,
        "program": checked.found.to_dict(),
        "needed": checked.needed.to_dict() if checked.needed is not None else None,
        "settings": {
            knob: {
                "name": setting.name,
                "value": setting.value,
                "where": setting.where,
                "problem": setting.problem,
                "arrived": checked.found.settings.get(knob),
            }
            for knob, setting in checked.settings.items()
        },
        "suggestion": None
        if found is None
        else {
            "values": dict(found.change.values),
            "difference": found.change.difference,
            "step_s": found.step_s,
            "speedup": found.speedup,
            "found": found.found.to_dict(),
        },
        "least_bytes": checked.least_bytes,
        "runs": checked.runs,
        "notes": list(checked.notes),
    }


DATA = "every sequence is of full length; data, logging and evaluation take no memory"
"""Assumptions of every prediction of a program."""


def print_predicted(found: PredictedProgram) -> None:
    """The settings read, assumed and ignored, and the numbers."""
    plan = found.plan
    echo()
    print_fields(
        [
            ("program", shlex.join(found.command)),
            ("trainer", plan.trainer),
            ("model", plan.model),
            ("GPU", found.gpu.name),
            ("read as", settings_text(plan.configuration)),
            ("assumed", "; ".join((*plan.assumed, DATA))),
            ("left out", ", ".join(plan.left_out)),
            ("notes", "; ".join(plan.notes)),
        ]
    )
    prediction = found.prediction
    print_evidence(prediction, prediction.budget, fits=prediction.fits)
