"""Searches GPU types: reads the journals, runs the missing trials, writes every result.

All checks of the options come first: until they pass, nothing is written and Ray is not started.
At the end, one training on an emulated GPU verifies the recommendation of a predicted search. That
changes none of the predicted numbers. If it does not fit, the configuration is excluded, and the
next best is verified.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuner.app.listener import SILENT, Listener
from tuner.app.measuring import Predicting, emulating
from tuner.app.recommendation import Recommended, nothing_fits
from tuner.app.search.plan import SearchPlan, SkippedGpu, none_left
from tuner.app.search.predicted import keep_predictions, search_predicted
from tuner.app.search.prepare import Predictors, Prepared, prepare
from tuner.app.search.result_files import Contents, journal_of, timeline_of, write_results
from tuner.app.search.supported import is_predicted
from tuner.app.target import comparable, excluded_text, sorted_by_use, stale_text, with_margin
from tuner.core.errors import NothingFitsError, TunerError, UnavailableError
from tuner.core.meanwhile import environment
from tuner.core.records import Source, Status, TrialRecord
from tuner.core.setup.distributed_knobs import most_gpus_per_trial
from tuner.emulator.build import unavailable
from tuner.searches.best import BestTrial
from tuner.searches.joining import AT_IMPORT_OF_RAY
from tuner.searches.journal import JournalWriter
from tuner.searches.options import without_effect
from tuner.searches.progress import Progress
from tuner.searches.request import SearchOutcome, SearchRequest, write_pruned
from tuner.searches.view import View, build_view
from tuner.trial.base import Instructions

MOST_TRIES = 3
"""At most this many of the best are verified: more failures have another reason."""

BEGIN_WITHIN_S = 300.0
"""In a search of many GPU types, later verifications are skipped after this time."""

SWITCH = "TUNER_VERIFY"
"""Environment variable that turns verification off with the value "no"."""


def verify_all(
    done: Sequence[tuple[SearchPlan, JournalWriter, SearchOutcome | None]],
    listener: Listener,
    began_s: float,
) -> None:
    """Verify the recommendation of each predicted search, and write that into its journal.

    Does nothing where GPUs cannot be emulated. Ctrl-C ends the verification only. The time limit of
    the search, which began at `began_s`, holds here too.
    """
    wanted = [
        (plan, writer) for plan, writer, result in done if result and _is_wanted(plan, result)
    ]
    if not wanted or unavailable() is not None:
        return
    started_s = time.monotonic()
    try:
        for plan, writer in wanted:
            if time.monotonic() - started_s > BEGIN_WITHIN_S:
                listener.warn("the other GPU types are not verified: that would take long")
                return
            limit_s = plan.options.time_limit_s
            until_s = math.inf if limit_s is None else began_s + limit_s
            _verify(plan, writer, listener, until_s)
    except KeyboardInterrupt:
        listener.warn("the verification was interrupted; the same command begins it again")


def _is_wanted(plan: SearchPlan, result: SearchOutcome) -> bool:
    return (
        plan.options.verify
        and os.environ.get(SWITCH, "").lower() != "no"
        and isinstance(plan.trials_on, Predicting)
        and plan.part.space.predictable
        and result.failure is None
        and not result.interrupted
    )


def _verify(plan: SearchPlan, writer: JournalWriter, listener: Listener, until_s: float) -> None:
    """Verify the best, and the next best if it does not fit, at most `MOST_TRIES` times."""
    gpu, space, run_id = plan.target.gpu, plan.part.space, uuid.uuid4().hex[:8]
    for number in range(MOST_TRIES):
        best = _best(plan)
        if best is None or best.source is not Source.PREDICTED or best.record.verified_by:
            return
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            listener.warn("not verified: --time-limit is over")
            return
        listener.say(
            f"verifying the recommendation on an emulated {gpu.name}, seconds to two minutes "
            "(--no-verify leaves it out)"
        )
        try:
            where = emulating(gpu, gpus=most_gpus_per_trial(space.choices, space.fixed))
            how = where.options(timeout_s=None if math.isinf(left_s) else left_s)
            trial = (space, best.configuration, best.record.outcome.prediction)
            outcome = where.run(plan.job, how, trial, Instructions(verify=True))
        except TunerError as error:
            listener.warn(f"not verified: {error}")
            return
        writer.append(
            plan.record(
                best.configuration,
                dataclasses.replace(outcome, prediction=best.record.outcome.prediction),
                trial_id=f"{run_id}-{number:03d}",
                searcher=plan.options.searcher,
                emulated_device=where.names[0],
                margin_bytes=plan.margin_bytes,
                verification=True,
            )
        )
        if outcome.status is Status.INTERRUPTED:
            return


def _best(plan: SearchPlan) -> BestTrial | None:
    """The current recommendation under the conditions of the search."""
    records = comparable(plan.target.folder.read_all(), plan.target)
    return build_view(
        [with_margin(record, plan.margin_bytes) for record in records],
        plan.facts,
        plan.target.gpu,
        where=plan.meets,
        conditions=plan.all_conditions,
    ).best


HINT = "lower the floors with --where, allow smaller values in the space, or choose a larger GPU"

LEAST_TIME_S = 1e-3
"""Time limit of a search whose time is over: no trial starts, but known results are shown."""


@dataclass(frozen=True, slots=True)
class SearchedGpu:
    """Result of a search of one GPU type: its trials, and the view that its files show."""

    plan: SearchPlan
    result: SearchOutcome
    view: View

    @property
    def answer(self) -> Recommended:
        """The recommendation, or the reason why there is none."""
        plan, view = self.plan, self.view
        met = [record for record in view.records if plan.meets(record.configuration)]
        reason = "" if view.best else nothing_fits(plan.target, met, plan.conditions)
        return Recommended(plan.target.gpu, view.best, reason)


@dataclass(frozen=True, slots=True)
class _Open:
    """A search that is about to run, with its journal."""

    plan: SearchPlan
    prepared: Prepared
    writer: JournalWriter
    known: tuple[TrialRecord, ...]

    @property
    def is_predicted(self) -> bool:
        """True for a search that only predicts and runs no trial."""
        return isinstance(self.plan.trials_on, Predicting)


def run_plans(
    plans: Sequence[SearchPlan | SkippedGpu], *, command: str, listener: Listener = SILENT
) -> list[SearchedGpu | SkippedGpu]:
    """Search every planned GPU type; the reports show `command` as the way to repeat it.

    A type is refused, without a trial, if no configuration is predicted to fit it. Raises
    `NothingFitsError` if all types are refused. All journals stay valid after this error, after an
    interruption and after any other error.
    """
    started_s = time.monotonic()
    predictors = Predictors()
    plans = [_answered(plan, predictors, alone=len(plans) == 1) for plan in plans]
    found: dict[str, SearchedGpu | SkippedGpu] = {}
    with contextlib.ExitStack() as journals:
        opened = _open(plans, journals, found, listener, predictors)
        if not opened:
            raise none_left([one for one in found.values() if isinstance(one, SkippedGpu)])
        try:
            results = _run(opened, listener, predictors, started_s)
        except UnavailableError:
            # The journals alone: the error that ended the search is the answer.
            known = [
                _contents(one, None, command=command) for one in opened if not one.is_predicted
            ]
            with contextlib.suppress(TunerError):
                write_results([contents for contents in known if contents.records])
            raise
        verify_all(
            [(one.plan, one.writer, r) for one, r in zip(opened, results, strict=True)],
            listener,
            started_s,
        )
    ran = []
    for one, result in zip(opened, results, strict=True):
        # An interruption after its first trial is no failure.
        error = result.failure if result else TunerError("interrupted before its first trial")
        if result is None or (error is not None and (len(plans) == 1 or not result.records)):
            assert error is not None
            found[one.plan.target.gpu.id] = SkippedGpu(one.plan.target, error)
            continue
        if error is not None:
            listener.warn(f"{one.plan.target.gpu.id}: {error}")
        ran.append((one, result))
    if not ran:
        raise none_left([one for one in found.values() if isinstance(one, SkippedGpu)])
    for one_found in _write(ran, command=command):
        found[one_found.plan.target.gpu.id] = one_found
    return [found[plan.target.gpu.id] for plan in plans]


def _answered(
    plan: SearchPlan | SkippedGpu, predictors: Predictors, *, alone: bool
) -> SearchPlan | SkippedGpu:
    """The plan, unless it needs a trace and nothing is installed to trace: found before a file is.

    Raises `UnavailableError` for a plan that is `alone`.
    """
    if isinstance(plan, SkippedGpu) or not is_predicted(plan.part.space, plan.target.gpu):
        return plan
    try:
        predictors.of(plan).require_timelines(plan.part.supported)
    except UnavailableError as error:
        if alone:
            raise
        return SkippedGpu(plan.target, error)
    return plan


def _open(
    plans: Sequence[SearchPlan | SkippedGpu],
    journals: contextlib.ExitStack,
    found: dict[str, SearchedGpu | SkippedGpu],
    listener: Listener,
    predictors: Predictors,
) -> list[_Open]:
    """The searches to run, with their journals open in `journals`; refused ones go to `found`."""
    begun: list[tuple[SearchPlan, JournalWriter, tuple[TrialRecord, ...]]] = []
    for plan in plans:
        if isinstance(plan, SkippedGpu):
            found[plan.target.gpu.id] = plan
            listener.refused(plan)
        else:
            begun.append((plan, *journals.enter_context(journal_of(plan))))
            listener.planned(plan, begun[-1][2])
    opened = []
    for plan, writer, known in begun:
        prepared = prepare(plan, known, listener, predictors=predictors)
        if not prepared.why_infeasible:
            opened.append(_Open(plan, prepared, writer, known))
            continue
        refused = SkippedGpu(plan.target, NothingFitsError(prepared.why_infeasible, hint=HINT))
        found[plan.target.gpu.id] = refused
        if len(plans) > 1:  # else it is the error that the search ends with
            listener.refused(refused)
    return opened


def _run(
    opened: Sequence[_Open], listener: Listener, predictors: Predictors, started_s: float
) -> list[SearchOutcome | None]:
    """The result of each search; None for those that an interruption kept from starting."""
    results: dict[str, SearchOutcome | None] = {}
    predicted = [one for one in opened if one.is_predicted]
    if predicted and (unused := without_effect(predicted[0].plan.options)):
        listener.note(f"no effect on a predicted search, which runs no trials: {unused}")
    with listener.searching() as report:
        latest: dict[str, Progress] = {}

        def progress(states: Mapping[str, Progress]) -> None:
            latest.update(states)
            report(latest)

        for together, run in _searches(opened, progress, predictors, started_s):
            is_over = any(found is None or found.interrupted for found in results.values())
            found = [None] * len(together) if is_over else run()
            ids = (one.plan.target.gpu.id for one in together)
            results |= dict(zip(ids, found, strict=True))
    return [results[one.plan.target.gpu.id] for one in opened]


_OnProgress = Callable[[Mapping[str, Progress]], None]

_Run = Callable[[], Sequence[SearchOutcome]]
"""Runs searches, and returns their results in order."""


def _searches(
    opened: Sequence[_Open], progress: _OnProgress, predictors: Predictors, started_s: float
) -> Iterator[tuple[Sequence[_Open], _Run]]:
    """The searches that run at the same time, and their run: those without trials first."""
    for one in opened:
        if one.is_predicted:
            yield [one], functools.partial(_predict, one, progress, predictors)
    others = [one for one in opened if not one.is_predicted]
    for batch in batches([one.prepared.request for one in others]):
        together, others = others[: len(batch)], others[len(batch) :]
        yield together, functools.partial(_run_trials, together, progress, started_s)


def _predict(one: _Open, progress: _OnProgress, predictors: Predictors) -> list[SearchOutcome]:
    return [
        search_predicted(
            one.plan,
            one.prepared.predictions,
            one.known,
            predictors.of(one.plan),
            on_record=one.writer.append,
            on_progress=lambda state: progress({one.plan.target.gpu.id: state}),
        )
    ]


def _run_trials(
    together: Sequence[_Open], progress: _OnProgress, started_s: float
) -> Sequence[SearchOutcome]:
    own = all(one.prepared.request.options.address is None for one in together)
    with environment(AT_IMPORT_OF_RAY if own else {}):
        from tuner.searches.ray.driver import search_all  # Ray and Optuna: seconds to import

    writers = {one.plan.target.gpu.id: one.writer for one in together}
    spent_s = time.monotonic() - started_s
    requests = [one.prepared.request for one in together]
    for number, request in enumerate(requests):
        if request.options.time_limit_s is not None:
            left_s = max(request.options.time_limit_s - spent_s, LEAST_TIME_S)
            options = dataclasses.replace(request.options, time_limit_s=left_s)
            requests[number] = dataclasses.replace(request, options=options)
    return search_all(
        requests,
        on_progress=lambda states: progress(dict(zip(writers, states, strict=True))),
        on_record=lambda record: writers[record.gpu].append(record),
    )


def batches(requests: Sequence[SearchRequest]) -> Iterator[list[SearchRequest]]:
    """Batches of searches that run at the same time, in the order of `requests`.

    Searches on a cluster run together, and so do emulated ones. A search that measures on this
    machine runs alone: Ray does not distinguish the GPU types of one machine.
    """
    together: list[SearchRequest] = []
    for request in requests:
        alone = request.trial_device is not None and not request.trial_device.emulated
        if not alone or request.options.address is not None:
            together.append(request)
            continue
        if together:
            yield together
            together = []
        yield [request]
    if together:
        yield together


def _write(ran: Sequence[tuple[_Open, SearchOutcome]], *, command: str) -> list[SearchedGpu]:
    """Write every file of every GPU type's folder, and return the searches with their views."""
    contents = []
    for one, result in ran:
        predicted = None
        if one.is_predicted:
            predicted = keep_predictions(one.plan, result.records)
        elif result.pruned or len(result.records) > result.reused:  # else nothing changed
            write_pruned(one.plan.target.folder, result.pruned)
        contents.append(_contents(one, result, predicted, command=command))
    views = write_results(contents)
    return [
        SearchedGpu(one.plan, result, view) for (one, result), view in zip(ran, views, strict=True)
    ]


def _contents(
    one: _Open,
    result: SearchOutcome | None,
    predicted: Sequence[TrialRecord] | None = None,
    *,
    command: str,
) -> Contents:
    """The comparable records of the journal, described by `result` if the search has one.

    `predicted` are the predictions beside the journal, if they were just written.
    """
    plan, target = one.plan, one.plan.target
    folder = target.folder
    found = folder.read_all() if predicted is None else (*predicted, *folder.read().records)
    known = sorted_by_use(found, target)
    records = known.comparable or (result.records if result else ())
    old = stale_text(known.stale, records)
    used = f" (hints for this search: {result.stale})" if result and result.stale else ""
    return Contents(
        target,
        plan.facts,
        [with_margin(record, plan.margin_bytes) for record in records],
        {
            "where": plan.meets,
            "conditions": plan.all_conditions,
            "command": command,
            "notes": [
                *one.prepared.notes,
                *([f"{old} left out{used}"] if old else []),
                *(result.warnings if result else ()),
                *filter(None, [excluded_text(known.aside)]),
            ],
        },
        functools.partial(timeline_of, plan.part.space, target.gpu, plan.profile),
    )
