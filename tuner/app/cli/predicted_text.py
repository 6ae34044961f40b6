"""How `tuner check` prints what is predicted of a program."""

from __future__ import annotations

import shlex

from tuner.app.cli.evidence import print_evidence
from tuner.app.program_oracle import PredictedProgram
from tuner.report.terminal.render import echo, print_fields, settings_text

DATA = "every sequence is of full length; data, logging and evaluation take no memory"
"""What every prediction of a program assumes."""


def print_predicted(found: PredictedProgram) -> None:
    """What was read, assumed and left out, and the numbers."""
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
    print_evidence(prediction, fits=prediction.fits, limit_bytes=prediction.budget.limit_bytes)
