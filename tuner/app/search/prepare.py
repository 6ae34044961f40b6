"""Turns a checked plan into a search request: predictions, first trials and the device."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.app.device import CPU
from tuner.app.listener import SILENT, Compiling, Listener
from tuner.app.measuring import Measuring, labels_of
from tuner.app.program_oracle import ProgramRuns
from tuner.app.program_prior import program_predictions
from tuner.app.search.plan import SearchPlan
from tuner.app.search.supported import has_program_prior, is_predicted
from tuner.app.target import sorted_by_use
from tuner.core.host import usable_cpus
from tuner.core.records import Configuration, Prediction, TrialRecord
from tuner.core.units import format_duration, format_size
from tuner.predict.candidates import inert_knobs, shortlist
from tuner.predict.predictor import Predictor, SpacePredictor, predictor_of
from tuner.predict.stages import hardest_first
from tuner.program.program import read_program
from tuner.searches.options import DEFAULT_SEARCHER, SearchOptions
from tuner.searches.request import SearchRequest
from tuner.space import SearchSpace, configure
from tuner.trial.base import MeasureOptions, RunnerFactory
from tuner.trial.isolated import IsolatedRunner
from tuner.trial.staged import StagedFactory
from tuner.trial.stop_rule import LONGEST_S


@dataclass(frozen=True, slots=True)
class Prepared:
    """A search that is ready to run.

    `predictions` are those of the supported configurations, in their order; empty where none were
    needed. `notes` are sentences about the space for people. `why_infeasible` says why no trial is
    worth running; empty where some may fit.
    """

    request: SearchRequest
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...]
    why_infeasible: str = ""


class Predictors:
    """Predicts for several GPU types, which share the traces of each workload and model."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], Predictor] = {}

    def of(self, plan: SearchPlan, on_progress: Compiling | None = None) -> SpacePredictor:
        """The predictor of a plan's space on its GPU type."""
        space = plan.part.space
        job = (space.workload, space.predicted_model())
        if job not in self._made:
            self._made[job] = predictor_of(space, workers=usable_cpus())
        return SpacePredictor(
            space,
            plan.target.gpu,
            margin_fraction=plan.margin_fraction,
            profile=plan.profile,
            predictor=self._made[job],
            on_progress=on_progress,
        )


def prepare(
    plan: SearchPlan,
    known: tuple[TrialRecord, ...],
    listener: Listener = SILENT,
    *,
    predictors: Predictors | None = None,
) -> Prepared:
    """Predict the configurations of a plan and build its search request.

    Nothing is predicted or tried if known trials have spent the budget already. With shared
    `predictors`, several GPU types take little more time than one.
    """
    options, space, trials_on = plan.options, plan.part.space, plan.trials_on
    initial: list[Configuration] = []
    predictions: list[Prediction] = []
    # Earlier traces don't count against the budget: a space is predicted in seconds.
    spent = isinstance(trials_on, Measuring) and _known_number(plan, known) >= options.trials
    if not is_predicted(space, plan.target.gpu):
        initial = baseline_of(space)
        guided = options.searcher == DEFAULT_SEARCHER
        if guided and not spent and has_program_prior(space, plan.target.gpu):
            predictions = _program_predictions(plan, listener)
    elif not spent:
        predictions = _predictions(plan, predictors or Predictors(), listener)
        initial = _initial(plan, predictions)
    request = _request(plan, known, initial, listener, predictions)
    prepared = Prepared(
        request,
        tuple(predictions),
        _inert(plan, predictions, listener),
        why_infeasible(plan, known, predictions),
    )
    text = _expected_text(plan, request, known, predictions)
    if text and not prepared.why_infeasible:
        listener.say(text)
    return prepared


def _request(
    plan: SearchPlan,
    known: tuple[TrialRecord, ...],
    initial: Sequence[Configuration],
    listener: Listener,
    predictions: Sequence[Prediction],
) -> SearchRequest:
    """The request of a plan's search; `predictions` are of the supported configurations."""
    options, space = plan.options, plan.part.space
    trials_on, job = plan.trials_on, plan.job
    # Without a device, the runners only describe trials; none runs.
    runners: RunnerFactory = functools.partial(IsolatedRunner, job, MeasureOptions())
    how: dict[str, Any] = {}
    if isinstance(trials_on, Measuring):
        runners = trials_on.factory(job, measure_options(trials_on, options))
        how = {
            "trial_device": trials_on.trial_device,
            "resources_per_trial": trials_on.resources,
            "local_gpus": trials_on.local,
            "title": space.predicted_model() if space.predictable else "",
        }
    if predictions:
        how["predictions"] = {
            configuration.key: prediction
            for configuration, prediction in zip(plan.part.supported, predictions, strict=True)
        }
    if space.stages:
        named = zip(plan.part.supported, predictions, strict=True) if predictions else ()
        runners = StagedFactory(runners, space, {c.key: hardest_first(p) for c, p in named})
    return SearchRequest(
        runner_factory=runners,
        space=space,
        configurations=plan.part.supported,
        gpu=plan.target.gpu,
        # Any trial of a command already runs its worst case.
        options=dataclasses.replace(options, verify=options.verify and job.command is None),
        labels=labels_of(options),
        tell=listener.say,
        objectives=plan.objectives,
        initial=initial,
        resume=(*sorted_by_use(plan.target.folder.read().records, plan.target).stale, *known),
        margin_bytes=plan.margin_bytes,
        versions=plan.versions,
        **how,
    )


def _expected_text(
    plan: SearchPlan,
    request: SearchRequest,
    known: Sequence[TrialRecord],
    predictions: Sequence[Prediction],
) -> str:
    """The number of trials to run, their time and cost as far as known, and the most they cost."""
    trials_on, gpu, options = plan.trials_on, plan.target.gpu, request.options
    number = min(options.trials, len(plan.part.supported)) - _known_number(plan, known)
    if number < 1 or not isinstance(trials_on, Measuring):
        return ""
    price = (gpu.price_usd_per_hour or 0.0) * request.gpus_per_trial / 3600
    took = [r.outcome.duration_s for r in known if plan.is_alike(r) and r.fits]
    if not took and not trials_on.emulated:
        took = _predicted_s(plan, predictions)
    text = f"to run on {gpu.id}: {number} trial{'s' if number > 1 else ''}"
    if took:
        total_s = number * statistics.median(took)
        at_once = options.workers or max(1, len(trials_on.local) // trials_on.gpus)
        whose = " of GPU time" if options.address and not options.workers else ""
        text += f", about {format_duration(total_s / at_once)}{whose}"
        text += f" and {total_s * price:.2f} USD" if price else ""
    if not price:
        return text
    limits = [(number + options.verify) * (options.timeout_s or LONGEST_S) * price]
    limits += [options.max_cost_usd] if options.max_cost_usd is not None else []
    limits += [options.gpu_hours * price * 3600] if options.gpu_hours is not None else []
    return f"{text}; at most {min(limits):.2f} USD"


def _predicted_s(plan: SearchPlan, predictions: Sequence[Prediction]) -> list[float]:
    """The predicted time of a trial of each configuration that fits, in seconds."""
    from tuner.searches.candidates import Candidates  # Optuna
    from tuner.searches.guided.pool import Pool

    if not any(prediction.fits for prediction in predictions):
        return []
    assert isinstance(plan.trials_on, Measuring)
    candidates = Candidates(plan.part.supported, tuple(plan.part.space.knobs))
    how = measure_options(plan.trials_on, plan.options)
    times = Pool.of(candidates, predictions, how).trial_s.tolist()
    return [s for s, prediction in zip(times, predictions, strict=True) if prediction.fits]


def _known_number(plan: SearchPlan, known: Sequence[TrialRecord]) -> int:
    """Number of known trials that count for this search: the same kind, within its conditions."""
    own = {configuration.key for configuration in plan.part.supported}
    return sum(
        plan.is_alike(record) and not record.verification and record.configuration.key in own
        for record in known
    )


PROCESSOR_BUDGET_S = 0.5
"""Time for the timed steps of a trial on a processor, whose tiny models take milliseconds each."""


def measure_options(
    trials_on: Measuring,
    options: SearchOptions,
    processor_budget_s: float | None = PROCESSOR_BUDGET_S,
) -> MeasureOptions:
    """The options of each real trial of a search."""
    budget = options.budget_s
    if budget is None and trials_on.device == CPU:
        budget = processor_budget_s
    return trials_on.options(
        budget_s=budget,
        timeout_s=options.timeout_s,
        weights=options.weights,
        lengths=options.lengths,
        whole_steps=options.whole_steps,
    )


SHORTLIST_SHARE = 0.75
"""Share of the budget for the predicted short list; Optuna proposes the other trials."""


def _initial(plan: SearchPlan, predictions: Sequence[Prediction]) -> list[Configuration]:
    """The first configurations to try: the space's baseline, then the predicted short list."""
    space = plan.part.space
    baseline = baseline_of(space)
    if plan.options.searcher == DEFAULT_SEARCHER:  # it starts from the predicted front by itself
        return baseline
    number = round(plan.options.trials * SHORTLIST_SHARE)
    return [*baseline, *shortlist(plan.part.supported, predictions, number)]


def baseline_of(space: SearchSpace) -> list[Configuration]:
    """The baseline of the space; empty without one."""
    return [configure(space, space.baseline)] if space.baseline else []


def _predictions(plan: SearchPlan, predictors: Predictors, listener: Listener) -> list[Prediction]:
    """A prediction of every supported configuration, in their order."""
    space = plan.part.space
    started = time.monotonic()
    with listener.compiling() as report:
        found = predictors.of(plan, report).predict(plan.part.supported)
    predictions = [each.prediction for each in found]
    fitting = sum(prediction.fits for prediction in predictions)
    stages = f" in {len(space.stages)} stages" if space.stages else ""
    listener.say(
        f"predicted all {len(predictions):,} configurations{stages} for {plan.target.gpu.id} in "
        f"{format_duration(time.monotonic() - started)}: {fitting:,} fit"
    )
    return predictions


def _program_predictions(plan: SearchPlan, listener: Listener) -> list[Prediction]:
    """A prediction of every configuration of a program, after a few emulated runs of it."""
    command = plan.part.space.command
    assert command is not None
    started = time.monotonic()
    listener.say("running the program with a few values to predict all of them")
    program = read_program(command.argv, Path(command.cwd))
    with ProgramRuns(program, plan.target.gpu, margin_fraction=plan.margin_fraction) as runs:
        predictions = program_predictions(plan.part.space, plan.part.supported, runs)
        listener.say(
            f"predicted all {len(predictions):,} configurations from {runs.count} emulated runs in "
            f"{format_duration(time.monotonic() - started)}: "
            f"{sum(prediction.fits for prediction in predictions):,} fit"
        )
    return predictions


def why_infeasible(
    plan: SearchPlan, known: Sequence[TrialRecord], predictions: Sequence[Prediction]
) -> str:
    """The reason why no trial can fit, by the predictions; empty if one may fit, or one did.

    A trial may need less memory than predicted: it is infeasible only if the lower end of the
    prediction's interval does not fit either.
    """
    if not predictions or any(record.fits for record in known):
        return ""
    if any(
        may_fit(prediction, measured=plan.trial_device is not None) for prediction in predictions
    ):
        return ""
    least = min(prediction.memory.device_bytes for prediction in predictions)
    gpu = plan.target.gpu
    return (
        f"none of the {len(predictions):,} configurations is predicted to fit {gpu.name}: the "
        f"smallest needs {format_size(least)} of {format_size(gpu.memory_bytes)}, of which "
        f"{format_size(plan.margin_bytes)} must stay free"
    )


def may_fit(prediction: Prediction, *, measured: bool) -> bool:
    """True unless a trial (`measured` or not) is sure to need too much memory."""
    if prediction.fits or not measured:
        return prediction.fits
    # Without an interval, the error of the prediction is unknown.
    low_bytes, _ = prediction.intervals.get("device_bytes", (0.0, 0.0))
    return prediction.budget.fits(low_bytes)


def _inert(
    plan: SearchPlan, predictions: Sequence[Prediction], listener: Listener
) -> tuple[str, ...]:
    """Notes about knobs that have no effect; `listener` gets them now, the report later."""
    if not predictions:
        return ()
    terms = plan.part.space.terms  # predictions say nothing of a knob that they leave out
    knobs = tuple(name for name in plan.part.space.knobs if terms[name].modelled)
    found = inert_knobs(plan.part.supported, predictions, knobs)
    notes = tuple(f"{inert} (predicted)" for inert in found)
    for note in notes:
        listener.note(note)
    return notes
