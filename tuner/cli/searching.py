"""What `tuner search` does: check everything, say the plan, search, write, print the answer.

Nothing is written, and Ray is not started, before all that can be checked has been checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from tuner.cli.answers import (
    conditions_text,
    nothing_fits,
    print_agreement,
    print_front,
    print_recommendation,
    record_dict,
    sources_text,
)
from tuner.cli.device import CPU, with_profile
from tuner.cli.measuring import Measuring, Mode, Simulating, decide
from tuner.cli.options import parse_margin
from tuner.cli.progress import compiling, reporting
from tuner.cli.quiet import quiet_libraries
from tuner.cli.render import count, print_fields, print_json
from tuner.cli.target import Target, check_conditions, comparable, with_margin
from tuner.errors import EXIT_FOUND, EXIT_INTERRUPTED, EXIT_NOTHING_FITS
from tuner.records import Configuration, KnobValue, Prediction, Source, TrialRecord
from tuner.units import format_duration, format_gib

if TYPE_CHECKING:
    from tuner.cli.support import SupportedSpace
    from tuner.estimate.profile import DeviceProfile
    from tuner.results.journal import JournalWriter
    from tuner.results.view import View
    from tuner.runner.base import MeasureOptions
    from tuner.tune.request import Bench, SearchRequest, SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The options of `tuner search` that say how to search."""

    trials: int
    seed: int
    time_limit: float | None
    margin: str | None
    searcher: str
    workers: int | None
    fresh: bool
    quiet: bool
    address: str | None
    where: tuple[str, ...]
    settings: tuple[str, ...]
    as_json: bool
    mode: Mode = Mode.AUTO
    memory_limit: int | None = None
    budget: float | None = None
    timeout: float | None = None
    weights: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A search that has been checked: what is tried, under which conditions."""

    target: Target
    options: SearchOptions
    part: SupportedSpace
    conditions: tuple[str, ...]
    pinned: Mapping[str, KnobValue]
    margin_fraction: float
    versions: Mapping[str, str]
    trials_on: Measuring | Simulating
    profile: DeviceProfile | None = None

    @property
    def bench(self) -> Bench | None:
        """Where trials run; None where they are simulated."""
        return self.trials_on.bench if isinstance(self.trials_on, Measuring) else None

    def is_alike(self, record: TrialRecord) -> bool:
        """Whether an earlier trial was run as this search runs its own."""
        if self.bench is None:
            return record.source is Source.PREDICTED
        return self.bench.ran(record)

    @property
    def margin_bytes(self) -> int:
        """The memory to keep free; rounded as the prediction does."""
        return round(self.target.gpu.memory_bytes * self.margin_fraction)

    @property
    def all_conditions(self) -> tuple[str, ...]:
        """The conditions and the settings, for people."""
        return (*self.conditions, *(f"{n} == {v!r}" for n, v in self.pinned.items()))

    def meets(self, configuration: Configuration) -> bool:
        """Whether a configuration of an earlier search is one that this one may recommend."""
        held = all(configuration.get(name) == value for name, value in self.pinned.items())
        return held and self.part.space.matches(configuration, self.options.where)


def run_search(target: Target, options: SearchOptions) -> int:
    """The whole command; returns its exit code."""
    with quiet_libraries():
        plan = make_plan(target, options)
        with _journal(plan) as (writer, known):
            result = _search(plan, writer, known)
        view = _write(plan, result)
    _print_answer(plan, result, view)
    if result.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FOUND if view.best is not None else EXIT_NOTHING_FITS


def make_plan(target: Target, options: SearchOptions) -> Plan:
    """Check everything that can be wrong. Raises `InputError`; writes no results."""
    from tuner.space import parse_settings

    settings = parse_settings(options.settings)
    space = target.space.with_settings(settings) if settings else target.space
    narrowed = dataclasses.replace(target, space=space)
    conditions = check_conditions(narrowed, options.where)
    margin = parse_margin(options.margin, target.gpu)
    trials_on = decide(
        options.mode,
        target.gpu,
        memory_limit=options.memory_limit,
        address=options.address,
        workers=options.workers,
    )
    space.require_configurations(options.where)
    target.folder.check_writable()
    target.folder.read()  # a journal that cannot be read is found now
    # Seconds to import from here on.
    from tuner.cli.support import supported_part
    from tuner.estimate.predict import DEFAULT_MARGIN_FRACTION
    from tuner.models.catalogue import architecture
    from tuner.runner.base import outcome_versions

    gpu, profile = with_profile(target.gpu, quiet=options.quiet, err=options.as_json)
    narrowed = dataclasses.replace(narrowed, gpu=gpu)
    part = supported_part(space, gpu, options.where)
    assert space.model is not None  # load_target sees to it
    # The architecture is a version too: a trial of another one under the same name says nothing.
    model = f"{space.model} {architecture(space.model).digest}"
    return Plan(
        target=narrowed,
        options=options,
        part=part,
        conditions=conditions,
        pinned={name: space.terms[name].read(value) for name, value in settings.items()},
        margin_fraction=DEFAULT_MARGIN_FRACTION if margin is None else margin,
        versions={**outcome_versions(), "model": model},
        trials_on=trials_on,
        profile=profile,
    )


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
    from tuner.runner.base import SimulatedFactory, TrialJob
    from tuner.tune.request import SearchRequest

    options, space = plan.options, plan.part.space
    assert space.model is not None  # load_target sees to it
    gpu, trials_on = plan.target.gpu, plan.trials_on
    job = TrialJob(space.workload, space.model, gpu, plan.margin_fraction, plan.profile)
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
    if sum(map(plan.is_alike, known)) < options.trials:
        predictions = _predictions(plan)
        initial = _initial(plan, predictions)
        if isinstance(trials_on, Measuring):
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
        margin_bytes=plan.margin_bytes,
        address=options.address,
        versions=plan.versions,
        **how,
    )


PROCESSOR_BUDGET_S = 1.0
"""Time for the timed steps of a trial on a processor: tiny models, and steps of milliseconds."""


def measure_options(trials_on: Measuring, options: SearchOptions) -> MeasureOptions:
    """How each real trial of a search runs."""
    budget = options.budget
    if budget is None and trials_on.device == CPU:
        budget = PROCESSOR_BUDGET_S
    return trials_on.options(budget_s=budget, timeout_s=options.timeout, weights=options.weights)


SHORTLIST_SHARE = 0.75
"""Part of the budget that goes to the predicted short list; Optuna proposes the rest."""


def _initial(plan: Plan, predictions: Sequence[Prediction]) -> list[Configuration]:
    """What is tried first: the space's baseline, and the short list of the predicted space."""
    from tuner.estimate.shortlist import shortlist

    space = plan.part.space
    baseline = [space.configuration(space.baseline)] if space.baseline else []
    number = round(plan.options.trials * SHORTLIST_SHARE)
    return [*baseline, *shortlist(plan.part.supported, predictions, number)]


def _predictions(plan: Plan) -> list[Prediction]:
    """A prediction of every configuration that can be tried, in their order."""
    from tuner.estimate.predictor import Job, Predictor, default_workers

    space, options = plan.part.space, plan.options
    assert space.model is not None  # load_target sees to it
    predictor = Predictor(Job(space.workload, space.model), workers=default_workers())
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


def print_plan(plan: Plan, known: tuple[TrialRecord, ...]) -> None:
    """What will be searched, on what, and where the numbers come from."""
    target, options, part = plan.target, plan.options, plan.part
    gpu = target.gpu
    wanted = f"{options.trials} of {count(len(part.supported))} configurations"
    searcher = f"{options.searcher}, seed {options.seed}"
    print_fields(
        [
            ("space", f"{target.space.name}: {target.space.description}".rstrip(": ")),
            ("model", str(target.space.model)),
            ("GPU", f"{gpu.name}, {format_gib(gpu.memory_bytes)}, {_price_text(plan)}"),
            ("to try", f"{wanted} ({searcher})"),
            ("where", _where_text(plan)),
            ("left out", _left_out_text(part)),
            ("margin", f"{format_gib(plan.margin_bytes)} of memory are to stay free (--margin)"),
            ("known", _known_text(plan, known)),
            ("numbers", _numbers_text(plan)),
        ],
        err=options.as_json,
    )
    click.echo(err=options.as_json)


def _price_text(plan: Plan) -> str:
    gpu = plan.target.gpu
    if gpu.price_usd_per_hour is None:
        return "price unknown (--price)"
    dated = f" ({gpu.price_date})" if gpu.price_date else ""
    return f"{gpu.price_usd_per_hour:g} USD per hour{dated}"


def _known_text(plan: Plan, known: tuple[TrialRecord, ...]) -> str:
    alike = sum(map(plan.is_alike, known))
    return f"{alike} trials from {plan.target.folder.journal}" if alike else ""


def _numbers_text(plan: Plan) -> str:
    if isinstance(plan.trials_on, Simulating):
        return f"predicted, not measured: {plan.trials_on.why}; each trial is simulated"
    return plan.trials_on.text(plan.target.gpu)


def _where_text(plan: Plan) -> str:
    text = conditions_text(plan.all_conditions)
    floors = [floor for floor in plan.conditions if floor not in plan.options.where]
    if floors:
        name = plan.part.space.condition(floors[0]).names
        text += f" (floors of the space; --where '{min(name)} >= ...' sets others)"
    return text


def _left_out_text(part: SupportedSpace) -> str:
    if not part.left_out:
        return ""
    reasons = "; ".join(part.reasons)
    return f"{count(part.left_out)} configurations that the GPU cannot run: {reasons}"


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


def _print_answer(plan: Plan, result: SearchResult, view: View) -> None:
    if plan.options.as_json:
        print_json(_answer_dict(plan, result, view))
        return
    new = len(result.records) - result.reused
    ended = {
        "budget": "",
        "exhausted": "; every configuration has been tried",
        "time_limit": "; the time limit was reached",
        "interrupted": "; interrupted, the same command goes on from here",
    }[str(result.stopped_by)]
    click.echo(f"{new} new trials in {format_duration(result.duration_s)}{ended}")
    click.echo(sources_text(view.records))
    click.echo()
    if view.best is None:
        met = [r for r in view.records if plan.meets(r.configuration)]
        click.echo(nothing_fits(plan.target, met, plan.conditions))
        click.echo("Lower the floors with --where, widen the space, or take a larger GPU.")
    else:
        print_front(view)
        click.echo()
        print_recommendation(view.best)
    print_agreement(view.records)
    click.echo()
    folder = plan.target.folder
    print_fields(
        [
            ("files", f"{folder.path}/: best.yaml, pareto.csv, pareto.png, report.html, "
             f"{folder.journal.name}"),
            ("more", plan.target.command("show")),
        ]
    )  # fmt: skip


def _answer_dict(plan: Plan, result: SearchResult, view: View) -> dict[str, Any]:
    folder = plan.target.folder
    return {
        "space": plan.target.space.name,
        "model": plan.target.space.model,
        "gpu": plan.target.gpu.id,
        "source": view.source,
        "stopped_by": str(result.stopped_by),
        "duration_s": round(result.duration_s, 3),
        "conditions": list(plan.all_conditions),
        "candidates": result.candidates,
        "left_out": plan.part.left_out,
        "trials": len(result.records),
        "reused": result.reused,
        "statuses": {str(status): number for status, number in result.counts.items()},
        "front": [record_dict(record) for record in view.front],
        "best": view.best.to_dict() if view.best else None,
        "files": {
            "journal": str(folder.journal),
            "pareto_csv": str(folder.pareto_csv),
            "best_yaml": str(folder.best_yaml),
            "pareto_png": str(folder.pareto_png),
            "report_html": str(folder.report_html),
        },
    }
