"""How the stages of a training are printed."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.core.records import Configuration, TrialRecord
from tuner.core.units import format_duration, format_size, significant
from tuner.predict.stages import StagedPrediction
from tuner.report.terminal.render import echo, print_fields
from tuner.report.terminal.tables import print_rows
from tuner.searches.facts import SpaceFacts, StageRow, rows_of, stage_rows

_NUMBERS = ("memory", "samples/s", "step", "time")


def print_stages(record: TrialRecord, space: SpaceFacts) -> None:
    """Every stage of a trial with its memory, speed and time; nothing where there are none."""
    evidence = record.outcome.evidence
    if evidence is not None:
        print_rows_of_stages(rows_of(record, space), str(evidence.source))


def print_staged(staged: StagedPrediction, configuration: Configuration, space: SpaceFacts) -> None:
    """The stages of one prediction, and how long they take together."""
    overall = staged.overall
    rows = stage_rows(overall, configuration, space, overall.budget)
    print_rows_of_stages(rows, str(overall.source))
    fields = []
    if staged.epoch_s is not None:
        fields.append(("one epoch of each", format_duration(staged.epoch_s)))
    if staged.run_s is not None and staged.run_s != staged.epoch_s:
        fields.append(("all epochs", format_duration(staged.run_s)))
    print_fields(fields, indent=2)


def print_rows_of_stages(rows: Sequence[StageRow], source: str) -> None:
    """The stages as a table."""
    if not rows:
        return
    echo(f"\nStages ({source})")
    print_rows(
        ["", "stage", *_NUMBERS, "sets"],
        [
            (
                "!" if not row.fits else "*" if row.hardest else "",
                row.label,
                format_size(row.numbers.device_bytes),
                significant(row.numbers.samples_per_s),
                format_duration(row.numbers.step_s),
                row.time_text,
                row.settings,
            )
            for row in rows
        ],
        right=_NUMBERS,
    )
    echo("* needs the most memory and decides what fits")
    if not all(row.fits for row in rows):
        echo("! does not fit")
