"""What results say of trainings that have stages: which one limits, and how long each takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.core.records import (
    Configuration,
    Measurement,
    MemoryBudget,
    Prediction,
    StageNumbers,
    TrialRecord,
)
from tuner.core.units import format_duration, format_size
from tuner.searches.facts import SpaceFacts, StageFacts

MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class StageRow:
    """Stages that came to the same numbers, as one row.

    `settings` is what the stage sets, `run_s` the time of all its epochs, of each of the stages;
    None where it is not known how many examples it has.
    """

    names: tuple[str, ...]
    settings: str
    numbers: StageNumbers
    run_s: float | None
    hardest: bool
    fits: bool

    @property
    def label(self) -> str:
        """The names, shortened where they are many."""
        first, *rest = self.names
        return ", ".join(self.names) if len(self.names) <= MAX_NAMES else f"{first} to {rest[-1]}"

    @property
    def time_text(self) -> str:
        """How long it takes, for people."""
        each = " each" if len(self.names) > 1 else ""
        return "?" if self.run_s is None else format_duration(self.run_s) + each


def rows_of(record: TrialRecord, space: SpaceFacts) -> list[StageRow]:
    """The stages of a trial; see `stage_rows`. Empty without numbers."""
    evidence, configuration = record.outcome.evidence, record.configuration
    if evidence is None:
        return []
    return stage_rows(evidence, configuration, space, record.budget)


def stage_rows(
    evidence: Prediction | Measurement,
    configuration: Configuration,
    space: SpaceFacts,
    budget: MemoryBudget,
) -> list[StageRow]:
    """The stages in their order, alike ones that follow each other together."""
    facts = {stage.name: stage for stage in space.stages}
    rows: list[StageRow] = []
    for name, numbers in evidence.stages.items():
        stage = facts.get(name, StageFacts(name))
        settings = stage.settings(configuration)
        names: tuple[str, ...] = (name,)
        if rows and (rows[-1].numbers, rows[-1].settings) == (numbers, settings):
            names = (*rows.pop().names, name)
        rows.append(
            StageRow(
                names=names,
                settings=settings,
                numbers=numbers,
                run_s=stage.run_s(numbers.samples_per_s),
                hardest=evidence.limiting_stage in names,
                fits=budget.fits(numbers.device_bytes),
            )
        )
    return rows


def limit_text(
    evidence: Prediction | Measurement, configuration: Configuration, space: SpaceFacts
) -> str:
    """Where the memory is the most: "in stage1 (n_negatives=24), the hardest of 5 stages".

    Empty where there are no stages.
    """
    name = evidence.limiting_stage
    if name is None:
        return ""
    stage = next((s for s in space.stages if s.name == name), StageFacts(name))
    settings = stage.settings(configuration)
    text = f"in {name} ({settings})" if settings else f"in {name}"
    return f"{text}, the hardest of {len(evidence.stages)} stages"


def stages_dict(record: TrialRecord, space: SpaceFacts) -> dict[str, Any]:
    """The stages as JSON types; nothing where there are none."""
    evidence = record.outcome.evidence
    if evidence is None or not evidence.stages:
        return {}
    return {
        "limiting_stage": evidence.limiting_stage,
        "stages": {
            name: {
                "settings": row.settings,
                "peak_device_memory": format_size(row.numbers.device_bytes),
                "peak_device_bytes": row.numbers.device_bytes,
                "samples_per_s": float(f"{row.numbers.samples_per_s:.6g}"),
                "step_s": float(f"{row.numbers.step_s:.6g}"),
                "time_s": None if row.run_s is None else round(row.run_s, 3),
            }
            for row in rows_of(record, space)
            for name in row.names
        },
    }


def seconds_of(
    stages: Mapping[str, StageNumbers], space: SpaceFacts
) -> tuple[float, float | None] | None:
    """Seconds of one pass over the data of every stage, and of all passes (None: unknown).

    None where the examples, or the numbers, of a stage are not known.
    """
    epoch_s = run_s = 0.0
    # A stage that says nothing of epochs has one, where others have some.
    epochs_known = any(stage.epochs is not None for stage in space.stages)
    for stage in space.stages:
        numbers = stages.get(stage.name)
        if numbers is None or stage.examples is None or numbers.samples_per_s <= 0:
            return None
        seconds = stage.examples / numbers.samples_per_s
        epoch_s += seconds
        run_s += seconds * (1.0 if stage.epochs is None else stage.epochs)
    return epoch_s, run_s if epochs_known else None
