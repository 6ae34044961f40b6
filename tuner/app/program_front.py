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
from tuner.searches.front import may_be_as_fast
from tuner.searches.view import View, build_view
from tuner.trial.base import outcome_versions

Values = Mapping[str, KnobValue]


@dataclass(frozen=True, slots=True)
class ProgramFront:
    """The front of a program's settings; all numbers are predicted.

    - `base` is the unchanged program, `varied` the values that were tried of each parameter.
    - `view` has the front and its recommended configuration.
    - `change` makes it the program's own; None if nothing fits, or nothing is clearly faster than
      the program as it is.
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
    # Packing, which predictions have under another name, is as it is read.
    read = {n: bool(settings[n].value) for n in varied if n in settings and n not in base.settings}
    own = Configuration({**read, **base.plan.settings})
    inert: list[str] = []
    untried: dict[str, list[str]] = {}  # by the reason
    tried: dict[str, tuple[Change, ProgramPlan, Configuration]] = {}
    for values in _combinations(own, varied, predictions):
        try:
            changed, plan, without_effect = _changed(predictions, values)
        except InputError as error:
            untried.setdefault(error.reason, []).append(settings_text(values))
            continue
        if without_effect:
            inert.append(f"{settings_text(without_effect)} has no effect in this program")
        seen = {name: changed.values.get(name, value) for name, value in read.items()}
        made = Configuration({**seen, **plan.settings})
        if made.key != own.key:
            tried.setdefault(made.key, (changed, plan, made))
    records = [_record(base, own)]
    for key, found in _predicted(predictions, tried).items():
        changed, _, made = tried[key]
        if isinstance(found, PredictedProgram):
            records.append(_record(found, made))
        else:
            why = found.message.partition("\n")[0]
            untried.setdefault(why, []).append(settings_text(changed.values))
    notes = [
        f"{texts[0]}{f' and {len(texts) - 1} more' * (len(texts) > 1)}: {why}"
        for why, texts in untried.items()
    ]
    name, model, knobs = Path(base.command[0]).stem, base.plan.model, tuple(varied)
    facts = SpaceFacts(name=name, description="", model=model, knobs=knobs, baseline=own)
    view = build_view(records, facts, base.gpu)
    best = view.best
    # The program stays as it is where the gain is within prediction error.
    stays = best is None or (base.fits and may_be_as_fast(records[0], best.record))
    change_of_best = None if stays or best is None else tried[best.configuration.key][0]
    return ProgramFront(base, varied, view, change_of_best, tuple(dict.fromkeys([*inert, *notes])))


def _changed(predictions: ProgramPredictions, values: Values) -> tuple[Change, ProgramPlan, Values]:
    """The program with `values` and its plan, both without those that have no effect, and these."""
    changed = change(predictions.settings, values)
    plan = predictions.plan(changed.after)
    inert = {n: v for n, v in values.items() if plan.settings.get(n, v) != v}
    if not inert:
        return changed, plan, {}
    others = {n: v for n, v in values.items() if n not in inert}
    changed, plan, more = _changed(predictions, others)
    return changed, plan, {**inert, **more}


def _predicted(
    predictions: ProgramPredictions, tried: Mapping[str, tuple[Change, ProgramPlan, Configuration]]
) -> dict[str, PredictedProgram | UnavailableError]:
    """The prediction of each changed program, or why there is none without PyTorch."""
    asked = {key: (changed.after, plan) for key, (changed, plan, _) in tried.items()}
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


def _record(found: PredictedProgram, configuration: Configuration) -> TrialRecord:
    return TrialRecord.of(
        Path(found.command[0]).stem,
        found.gpu,
        configuration,
        Outcome.predicted(found.prediction),
        versions=outcome_versions(ran=False),
        searcher="predicted",
    )
