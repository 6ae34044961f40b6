"""The front of throughput and memory of a program, predicted from its settings: nothing is run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.app.program_oracle import PredictedProgram, ProgramPredictions
from tuner.core.errors import InputError, UnavailableError, UnsupportedError, verdict_code
from tuner.core.expressions import settings_text
from tuner.core.records import Configuration, KnobValue, Outcome, TrialRecord
from tuner.program.changes import Change, change
from tuner.program.planned import ProgramPlan
from tuner.program.space_text import knobs_of
from tuner.report.terminal.front import record_dict
from tuner.searches.facts import SpaceFacts
from tuner.searches.view import View, build_view
from tuner.trial.base import outcome_versions

Values = Mapping[str, KnobValue]


@dataclass(frozen=True, slots=True)
class ProgramFront:
    """The front of a program's settings; all numbers are predicted.

    - `base` is the unchanged program, `varied` the values that were tried of each parameter.
    - `view` has the front and its recommended configuration.
    - `change` makes it the program's own; None if nothing fits, or the program has it already.
    - `notes` are changes that could not be tried.
    """

    base: PredictedProgram
    varied: Mapping[str, Sequence[KnobValue]]
    view: View
    change: Change | None
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 if a configuration fits, else 1."""
        return verdict_code(self.view.best is not None)

    @property
    def least_bytes(self) -> int:
        """The smallest device memory of any configuration."""
        return min(numbers[0] for numbers in self.view.numbers if numbers is not None)

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        best = self.view.best
        return {
            "source": "predicted",
            "fits": best is not None,
            "program": self.base.to_dict(),
            "varied": {name: list(values) for name, values in self.varied.items()},
            "front": [record_dict(record) for record in self.view.front],
            "best": None if best is None else record_dict(best.record),
            "values": dict(self.change.values) if self.change is not None else {},
            "difference": self.change.difference if self.change is not None else "",
            "least_bytes": self.least_bytes,
            "notes": list(self.notes),
        }


def predict_front(predictions: ProgramPredictions, knobs: Sequence[str] = ()) -> ProgramFront:
    """Predict the program with all values of `knobs` ("lora_rank=16,32").

    By default those that keep its result are varied: the micro-batch, with the accumulation that
    keeps the effective batch, and checkpointing. Raises `InputError` for settings that cannot be
    varied or predicted, among them torch.compile.
    """
    settings = predictions.settings
    base = predictions.as_it_is()
    if base.time is None:
        raise UnsupportedError(
            "the speed of a program under torch.compile isn't predicted",
            hint="leave --predict out: `tuner tune` runs it on the emulator",
        )
    if base.others:
        raise InputError(
            f"the program trains {1 + len(base.others)} times, and one training is tuned",
            hint=f"the largest is at {base.plan.where}: leave the others out",
        )
    varied = knobs_of(settings, base.settings, knobs)
    notes: list[str] = []
    tried: dict[str, tuple[Change, ProgramPlan]] = {}
    for values in _combinations(base.settings, varied, predictions):
        try:
            changed = change(settings, values)
            plan = predictions.plan(changed.after)
        except InputError as error:
            notes.append(f"{settings_text(values)}: {error.message}")
            continue
        wrong = [name for name, value in values.items() if plan.settings.get(name) != value]
        if wrong:
            notes.append(
                f"{settings_text(values)}: {', '.join(wrong)} has no effect in this program"
            )
        else:
            tried.setdefault(Configuration(plan.settings).key, (changed, plan))
    own = Configuration(base.plan.settings)
    records = {}
    for key, found in _predicted(predictions, tried).items():
        if isinstance(found, PredictedProgram):
            records[key] = _record(found)
        else:
            notes.append(f"{settings_text(tried[key][0].values)}: {found.message.splitlines()[0]}")
    records[own.key] = _record(base)
    name, model, knobs = Path(base.command[0]).stem, base.plan.model, tuple(varied)
    facts = SpaceFacts(name=name, description="", model=model, knobs=knobs, baseline=own)
    view = build_view(list(records.values()), facts, base.gpu)
    key = view.best.configuration.key if view.best is not None else own.key
    made = tried[key][0] if key != own.key else None
    return ProgramFront(base, varied, view, made, tuple(dict.fromkeys(notes)))


def _predicted(
    predictions: ProgramPredictions, tried: Mapping[str, tuple[Change, ProgramPlan]]
) -> dict[str, PredictedProgram | UnavailableError]:
    """The prediction of each changed program, or why there is none without PyTorch."""
    asked = {key: (changed.after, plan) for key, (changed, plan) in tried.items()}
    try:
        return dict(zip(asked, predictions.predicted([*asked.values()]), strict=True))
    except UnavailableError:
        each: dict[str, PredictedProgram | UnavailableError] = {}
        for key, one in asked.items():
            try:
                (each[key],) = predictions.predicted([one])
            except UnavailableError as error:
                each[key] = error
        return each


def _combinations(
    own: Values, varied: Mapping[str, Sequence[KnobValue]], predictions: ProgramPredictions
) -> Iterator[Values]:
    """Each combination of values, as what differs from the program's `own` settings."""
    keeps_batch = "micro_batch" in varied and "grad_accum" not in varied
    keeps_batch &= predictions.settings.can_change("grad_accum")
    batch = int(str(own["micro_batch"])) * int(str(own["grad_accum"]))
    for combination in itertools.product(*varied.values()):
        values = dict(zip(varied, combination, strict=True))
        if keeps_batch:
            values["grad_accum"] = batch // int(str(values["micro_batch"]))
        yield {name: value for name, value in values.items() if own.get(name) != value}


def _record(found: PredictedProgram) -> TrialRecord:
    return TrialRecord.of(
        Path(found.command[0]).stem,
        found.gpu,
        Configuration(found.plan.settings),
        Outcome.predicted(found.prediction),
        versions=outcome_versions(ran=False),
        searcher="predicted",
    )
