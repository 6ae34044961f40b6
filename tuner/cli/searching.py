"""What `tuner search` does: check everything, say the plan, search, write, print the answer.

Nothing is written, and Ray is not started, before all that can be checked has been checked.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from tuner.cli.device import CPU
from tuner.cli.measuring import Measuring
from tuner.cli.own_code import trial_job
from tuner.cli.progress import compiling, reporting
from tuner.cli.quiet import quiet_libraries
from tuner.cli.render import count
from tuner.cli.search_plan import Plan, SearchOptions, make_plan
from tuner.cli.search_text import print_answer, print_plan
from tuner.cli.target import Target, comparable, with_margin
from tuner.errors import EXIT_FOUND, EXIT_INTERRUPTED, EXIT_NOTHING_FITS
from tuner.records import Configuration, Prediction, TrialRecord
from tuner.units import format_duration

if TYPE_CHECKING:
    from tuner.results.journal import JournalWriter
    from tuner.results.view import View
    from tuner.runner.base import MeasureOptions
    from tuner.space import SearchSpace
    from tuner.tune.request import SearchRequest, SearchResult


def run_search(target: Target, options: SearchOptions) -> int:
    """The whole command; returns its exit code."""
    with quiet_libraries():
        plan = make_plan(target, options)
        with _journal(plan) as (writer, known):
            result = _search(plan, writer, known)
        view = _write(plan, result)
    print_answer(plan, result, view)
    if result.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FOUND if view.best is not None else EXIT_NOTHING_FITS


@contextlib.contextmanager
def _journal(plan: Plan) -> Iterator[tuple[JournalWriter, tuple[TrialRecord, ...]]]:
    """The journal to append to, and what it holds already.

    Known predictions are appended again when another margin is asked for: whether they fit
    then changes, and the last line of a configuration counts. Where nothing was appended, no
    empty journal stays behind.
    """
    folder = plan.target.folder
    if plan.options.fresh:
        _set_aside(plan)
    existed = [path for path in (folder.path, *folder.path.parents) if path.exists()]
    try:
        with folder.writer() as writer:
            known = []
            for record in comparable(folder.read().records, plan.target):
                changed = with_margin(record, plan.margin_bytes)
                if changed != record:
                    writer.append(changed)
                known.append(changed)
            yield writer, tuple(known)
    finally:
        if folder.journal.exists() and not folder.journal.stat().st_size:
            folder.journal.unlink()
            for path in (folder.path, *folder.path.parents):
                if path in existed or any(path.iterdir()):
                    break
                path.rmdir()


def _set_aside(plan: Plan) -> None:
    """Rename the journal of earlier searches, so that this one begins anew and nothing is lost."""
    journal = plan.target.folder.journal
    if not journal.exists():
        return
    with plan.target.folder.writer():  # nobody else is writing
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
        journal.rename(journal.with_name(f"trials-{stamp}.jsonl"))


def _search(plan: Plan, writer: JournalWriter, known: tuple[TrialRecord, ...]) -> SearchResult:
    if not plan.options.quiet:
        print_plan(plan, known)
    request = _request(plan, known)
    from tuner.tune.driver import search  # Ray and Optuna: seconds to import

    options = plan.options
    with reporting(err=options.as_json, quiet=options.quiet) as report:
        return search(request, on_progress=report, on_record=writer.append)


def _request(plan: Plan, known: tuple[TrialRecord, ...]) -> SearchRequest:
    from tuner.runner.factories import SimulatedFactory
    from tuner.tune.request import SearchRequest

    options, space = plan.options, plan.part.space
    gpu, trials_on = plan.target.gpu, plan.trials_on
    job = trial_job(space, gpu, plan.margin_fraction, plan.profile)
    how: dict[str, Any] = {"runner_factory": SimulatedFactory(job)}
    if isinstance(trials_on, Measuring):
        how = {
            "runner_factory": trials_on.factory(job, measure_options(trials_on, options)),
            "bench": trials_on.bench,
            "resources_per_trial": trials_on.resources,
            "local_gpus": trials_on.local,
        }
    initial: list[Configuration] = []
    # Where the budget is spent already, nothing is tried and nothing need be predicted.
    if not space.predictable:
        initial = _baseline(space)
    elif sum(map(plan.is_alike, known)) < options.trials:
        predictions = _predictions(plan)
        initial = _initial(plan, predictions)
        if isinstance(trials_on, Measuring) or options.searcher == "guided":
            how["predictions"] = {
                configuration.key: prediction
                for configuration, prediction in zip(plan.part.supported, predictions, strict=True)
            }
    return SearchRequest(
        space=plan.part,
        gpu=gpu,
        trials=options.trials,
        seed=options.seed,
        time_limit_s=options.time_limit,
        max_concurrent=options.workers,
        where=options.where,
        searcher=options.searcher,
        initial=initial,
        resume=known,
        workload=space.workload,
        margin_bytes=plan.margin_bytes,
        address=options.address,
        versions=plan.versions,
        **how,
    )


PROCESSOR_BUDGET_S = 0.5
"""Time for the timed steps of a trial on a processor: tiny models, and steps of milliseconds."""


def measure_options(trials_on: Measuring, options: SearchOptions) -> MeasureOptions:
    """How each real trial of a search runs."""
    budget = options.budget
    if budget is None and trials_on.device == CPU:
        budget = PROCESSOR_BUDGET_S
    return trials_on.options(
        budget_s=budget,
        timeout_s=options.timeout,
        weights=options.weights,
        wait_for_device_s=options.wait,
    )


SHORTLIST_SHARE = 0.75
"""Part of the budget that goes to the predicted short list; Optuna proposes the rest."""


def _initial(plan: Plan, predictions: Sequence[Prediction]) -> list[Configuration]:
    """What is tried first: the space's baseline, and the short list of the predicted space."""
    from tuner.estimate.shortlist import shortlist

    space = plan.part.space
    baseline = _baseline(space)
    if plan.options.searcher == "guided":  # it starts from the predicted front by itself
        return baseline
    number = round(plan.options.trials * SHORTLIST_SHARE)
    return [*baseline, *shortlist(plan.part.supported, predictions, number)]


def _baseline(space: SearchSpace) -> list[Configuration]:
    return [space.configuration(space.baseline)] if space.baseline else []


def _predictions(plan: Plan) -> list[Prediction]:
    """A prediction of every configuration that can be tried, in their order."""
    from tuner.estimate.compiling import default_workers
    from tuner.estimate.predictor import Job, Predictor

    space, options = plan.part.space, plan.options
    predictor = Predictor(Job(space.workload, space.predicted_model()), workers=default_workers())
    started = time.monotonic()
    with compiling(err=options.as_json, quiet=options.quiet) as report:
        predictions = predictor.predict(
            plan.part.supported,
            plan.target.gpu,
            margin_fraction=plan.margin_fraction,
            profile=plan.profile,
            on_progress=report,
        )
    if not options.quiet:
        fitting = sum(prediction.fits for prediction in predictions)
        click.echo(
            f"predicted all {count(len(predictions))} configurations in "
            f"{format_duration(time.monotonic() - started)}: {count(fitting)} fit",
            err=options.as_json,
        )
    return predictions


def _write(plan: Plan, result: SearchResult) -> View:
    """Write every file of the results folder, and return what they show."""
    target = plan.target
    records = comparable(target.folder.read().records, target) or result.records
    return target.folder.write_all(
        [with_margin(record, plan.margin_bytes) for record in records],
        target.facts,
        target.gpu,
        where=plan.meets,
        conditions=plan.all_conditions,
        command=_command_line(),
    )


def _command_line() -> str:
    """What was typed, for the report; the plain command where this is not the program."""
    context = click.get_current_context(silent=True)
    arguments = context.find_root().obj if context is not None else None
    return shlex.join(["tuner", *(arguments or sys.argv[1:])])
