"""Checks before a search: its options, its conditions, and the device of its trials."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tuner.app.device import profile_for
from tuner.app.measuring import Measuring, Predicting, decide
from tuner.app.recommendation import Recommended
from tuner.app.search import supported
from tuner.app.target import CannotRunError, Target, check_conditions
from tuner.core import errors
from tuner.core.gpu import Gpu
from tuner.core.records import (
    Configuration,
    KnobValue,
    MemoryBudget,
    Outcome,
    TrialRecord,
    parse_margin,
)
from tuner.core.setup.distributed_knobs import most_gpus_per_trial, most_machines
from tuner.cost.speed.profile import DeviceProfile
from tuner.program.vocabulary import settings_for
from tuner.searches.facts import SpaceFacts
from tuner.searches.front import DEFAULT_OBJECTIVES, Objective
from tuner.searches.objectives import objectives_of
from tuner.searches.options import DEFAULT_SEARCHER, Mode, SearchOptions
from tuner.searches.progress import Budget
from tuner.searches.request import TrialDevice, check_min_gain, check_objectives, ran_alike
from tuner.space import SearchSpace, pin
from tuner.trial.base import TrialJob, outcome_versions


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A search that has been checked: its configurations, conditions and device."""

    target: Target
    options: SearchOptions
    part: supported.SupportedSpace
    conditions: tuple[str, ...]
    pinned: Mapping[str, KnobValue]
    margin_fraction: float | None
    versions: Mapping[str, str]
    trials_on: Measuring | Predicting
    profile: DeviceProfile | None = None
    objectives: tuple[Objective, ...] = ()
    baseline: Mapping[str, KnobValue] | None = None

    @property
    def facts(self) -> SpaceFacts:
        """The facts of the space, with the objectives of the options if they name any.

        The gain is over the space's own baseline, whatever the settings hold.
        """
        facts = self.target.facts
        named = tuple(dict.fromkeys(self.options.objectives)) or facts.objectives
        return dataclasses.replace(facts, objectives=named, baseline=self.baseline)

    @property
    def trial_device(self) -> TrialDevice | None:
        """The device of the trials; None for a predicted search."""
        return self.trials_on.trial_device if isinstance(self.trials_on, Measuring) else None

    def is_alike(self, record: TrialRecord) -> bool:
        """True for an earlier record whose trial ran the way this search runs its own."""
        return ran_alike(record, self.trial_device)

    def record(
        self, configuration: Configuration, outcome: Outcome, *, trial_id: str, **more: Any
    ) -> TrialRecord:
        """A record of this search; its run is the first part of `trial_id`."""
        return TrialRecord.of(
            self.part.space.name,
            self.target.gpu,
            configuration,
            outcome,
            trial_id=trial_id,
            run_id=trial_id.partition("-")[0],
            seed=self.options.seed,
            versions=self.versions,
            **more,
        )

    @property
    def job(self) -> TrialJob:
        """The job that all trials have in common."""
        return supported.trial_job(
            self.part.space, self.target.gpu, self.margin_fraction, self.profile
        )

    @property
    def margin_bytes(self) -> int:
        """The memory to keep free, in bytes; rounded as the prediction does."""
        return MemoryBudget.of(self.target.gpu.memory_bytes, self.margin_fraction).margin_bytes

    @property
    def all_conditions(self) -> tuple[str, ...]:
        """The conditions and the settings, for people."""
        return (*self.conditions, *(f"{n} == {v!r}" for n, v in self.pinned.items()))

    def meets(self, configuration: Configuration) -> bool:
        """True for a configuration (of an earlier search, say) that this search may recommend."""
        held = all(configuration.get(name) == value for name, value in self.pinned.items())
        return held and self.part.space.matches(configuration, self.options.where)


@dataclass(frozen=True, slots=True)
class SkippedGpu:
    """A GPU type on which no trial is run, and why."""

    target: Target
    error: errors.TunerError

    @property
    def reason(self) -> str:
        """Why, in a sentence."""
        problems = getattr(self.error, "problems", ())
        listed = "; ".join(str(problem) for problem in problems)
        return f"{self.error.message}: {listed}" if listed else self.error.message

    @property
    def answer(self) -> Recommended:
        """The answer for this GPU type: nothing is recommended."""
        return Recommended(self.target.gpu, None, self.reason)

    def to_dict(self) -> dict[str, Any]:
        """JSON types, with the names of a search that ran."""
        space, gpu = self.target.space, self.target.gpu
        named = {"space": space.name, "model": space.model, "gpu": gpu.id}
        return {**named, "reason": self.reason, "best": None, "front": []}


def make_plans(targets: Sequence[Target], options: SearchOptions) -> list[SearchPlan | SkippedGpu]:
    """A plan for each GPU type, or the reason why it is skipped; see `make_plan`.

    An error in the options is raised. The reason is raised too where there is only one type, and
    `none_left` of all reasons where every type is skipped.
    """
    if len(targets) == 1:
        return [make_plan(targets[0], options)]
    plans: list[SearchPlan | SkippedGpu] = []
    for target in targets:
        try:
            plans.append(make_plan(target, options))
        except (CannotRunError, errors.UnavailableError) as error:
            plans.append(SkippedGpu(target, error))
    refused = [plan for plan in plans if isinstance(plan, SkippedGpu)]
    if len(refused) == len(plans):
        raise none_left(refused)
    return plans


def none_left(refused: Sequence[SkippedGpu]) -> errors.TunerError:
    """The error where every GPU type is refused, with all reasons."""
    if len(refused) == 1:
        return refused[0].error
    missing = all(isinstance(one.error, errors.UnavailableError) for one in refused)
    kind = errors.UnavailableError if missing else errors.NothingFitsError
    return kind(
        "none of these GPU types can be searched:\n"
        + "\n".join(f"  {one.target.gpu.id}: {one.reason}" for one in refused),
        hint=refused[0].error.hint,
    )


def make_plan(target: Target, options: SearchOptions) -> SearchPlan:
    """Check everything that can be wrong. Raises `InputError`; writes no results."""
    settings = settings_for(target.space, options.settings)
    space = pin(target.space, settings) if settings else target.space
    narrowed = dataclasses.replace(target, space=space)
    check_study(options.study)
    if options.metrics and options.address is not None:
        raise errors.InputError(
            f"--metrics is for a cluster of its own; the one at {options.address!r} offers the "
            "metrics of searches where it offers Ray's",
            hint="leave --metrics out, and scrape the ports of that cluster's nodes",
        )
    conditions = check_conditions(narrowed, options.where)
    margin = parse_margin(options.margin, target.gpu)
    trials_on = _trials_on(options, target.gpu, space)
    supported.require_trials(space, trials_on)
    runs = isinstance(trials_on, Measuring)
    lengths = options.lengths if runs else None
    if lengths == "data":
        supported.require_lengths(space)
    check_min_gain(options.min_gain, options.searcher)
    Budget(options, target.gpu.price_usd_per_hour)  # of valid limits
    objectives = _objectives(options, target)
    space.require_configurations(options.where)
    target.folder.check_writable()
    target.folder.read()  # a journal that cannot be read is found now
    gpu = target.gpu
    profile = profile_for(gpu) if supported.is_predicted(space, gpu) else None
    part = supported.supported_part(space, gpu, options.where, runs=runs)
    if objectives:
        from tuner.searches.guided.goals import check_known

        check_known(objectives, part.supported, gpu)
    return SearchPlan(
        target=narrowed,
        options=options,
        part=part,
        conditions=conditions,
        pinned={name: space.terms[name].read(value) for name, value in settings.items()},
        margin_fraction=margin,
        # The architecture too: a trial of another one under the same name says nothing.
        versions={**outcome_versions(ran=runs), "model": supported.model_version(space, lengths)},
        trials_on=trials_on,
        profile=profile,
        objectives=objectives,
        baseline=target.space.baseline or None,
    )


def _trials_on(options: SearchOptions, gpu: Gpu, space: SearchSpace) -> Measuring | Predicting:
    """The device of the trials; none by `auto` where a library of trials is not installed.

    Raises `UnavailableError` for the library if trials are asked for, or nothing is predicted.
    """
    names = (*("torch", "transformers") * space.predictable, "ray", "optuna")
    missing = next((name for name in names if find_spec(name) is None), None)
    needed = errors.missing_extra(ModuleNotFoundError(name=missing))
    may_predict = options.mode is Mode.AUTO and options.address is None
    if needed and not may_predict and options.mode is not Mode.PREDICT:
        raise needed
    found = decide(
        options,
        gpu,
        gpus_per_trial=most_gpus_per_trial(space.choices, space.fixed),
        machines=most_machines(space.choices, space.fixed) if space.predictable else 1,
    )
    if needed is None or isinstance(found, Predicting):
        return found
    if may_predict and supported.is_predicted(space, gpu):
        return Predicting(f"{missing} is not installed ({needed.hint})")
    raise needed


def _objectives(options: SearchOptions, target: Target) -> tuple[Objective, ...]:
    """The objectives of the search; empty for throughput and memory.

    Without `--objective` they are the objectives of the space, as far as the searcher supports
    them. Raises `InputError` for unknown or unsupported ones.
    """
    names = tuple(dict.fromkeys(options.objectives)) or target.facts.objectives
    found = objectives_of(names, target.facts, target.gpu)
    known = supported.has_predictions(target.space, target.gpu)
    searcher = options.searcher if known else f"{options.searcher} without predictions"
    if options.objectives:
        check_objectives(names, searcher)
    usual = not found or {o.name for o in found} == {o.name for o in DEFAULT_OBJECTIVES}
    return () if usual or searcher != DEFAULT_SEARCHER else found


def check_study(path: Path | None) -> None:
    """Raise `InputError` unless an Optuna study can be kept at `path`. Creates nothing."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise errors.InputError(f"--study {str(path)!r} is in a folder that does not exist")
    if not path.exists():
        return
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not a file"
        raise errors.InputError(f"--study {str(path)!r} is {kind}", hint="name a file")
    with path.open("rb") as file:
        start = file.readline(1000)
    if start and b'"op_code"' not in start:  # in each line of Optuna's journal files
        raise errors.InputError(
            f"--study {str(path)!r} exists and is not an Optuna study", hint="name a new file"
        )
