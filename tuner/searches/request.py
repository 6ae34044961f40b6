"""Request and outcome of a search: plain data, no Ray and no Optuna."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tuner.core.errors import InputError, TunerError
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Prediction, Source, Status, TrialRecord
from tuner.searches.front import DEFAULT_OBJECTIVES, Objective
from tuner.searches.options import DEFAULT_SEARCHER, SearchOptions, checked_searcher
from tuner.searches.progress import Budget, StoppedBy
from tuner.searches.store import ResultsFolder, write_atomically
from tuner.space import SearchSpace
from tuner.trial.base import RunnerFactory, outcome_versions


@dataclass(frozen=True, slots=True)
class Pruned:
    """A configuration that was held back, and the reason for people.

    `since` is the id of the trial after which it was held back, None before the first trial.
    `revived_by` is the id of the trial that revived it, None while it is held back.
    """

    configuration: Configuration
    reason: str
    since: str | None = None
    revived_by: str | None = None

    def to_dict(self) -> dict[str, object]:
        """JSON types only."""
        return {
            "configuration": self.configuration.to_dict(),
            "reason": self.reason,
            "since": self.since,
            "revived_by": self.revived_by,
        }


def write_pruned(folder: ResultsFolder, pruned: Iterable[Pruned]) -> None:
    """Replace `pruned.jsonl` atomically, one line per entry. Raises `UnavailableError`."""
    lines = [json.dumps(entry.to_dict(), separators=(",", ":")) + "\n" for entry in pruned]
    write_atomically(folder.path / "pruned.jsonl", "".join(lines))


@dataclass(frozen=True, slots=True)
class TrialDevice:
    """The device on which the trials of a search run: a real one, or an `emulated` one.

    `device` is its exact name. `memory_limit_bytes` limits the memory of a trial, so that a larger
    device can stand in for the searched GPU type.
    """

    device: str
    memory_limit_bytes: int | None = None
    emulated: bool = False


def ran_alike(record: TrialRecord, where: TrialDevice | None) -> bool:
    """True if the trial of `record` ran on this device under this limit; without one, on none.

    So predicted and measured records are never reused for each other.
    """
    if where is None:
        return record.source is Source.PREDICTED
    device, other = record.device, record.emulated_device
    if where.emulated:
        device, other = other, device
    ran = (device, other, record.memory_limit_bytes)
    return ran == (where.device, None, where.memory_limit_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """One search of one space for one GPU type.

    - `options` are those that were asked for. Their limits include trials reused from `resume`, so
      that the same request repeated after an interruption ends like an uninterrupted one; see
      `Budget`. Without `workers`, as many trials run at once as the cluster has room for. `verify`
      adds a verification of the recommendation, beyond the budget of trials. The file `study` gets
      a copy of the Optuna study for other Optuna tools; each search writes it again from the
      journal. `metrics` and `dashboard` of a cluster that is joined are its own.
    - `objectives` are for "guided" only, the first is primary; empty means throughput and memory,
      the only objectives of other searchers.
    - `configurations` are those to choose from; None for all that meet the options' `where`.
    - `initial` runs first, in its order; invalid configurations are skipped.
    - `resume` holds the journal. Records of this space, GPU, memory, library versions and
      trial_device are not run again; the searcher learns from them.
    - `trial_device` is the real or emulated device of the trials; None where none runs.
    - `predictions` are the predictions by configuration key. The record of a measured trial holds
      its prediction beside the measurement, and "guided" starts from the predictions if every
      valid configuration has one.
    - `margin_bytes` is the memory to keep free, noted in the records of measured trials.
    - `resources_per_trial` are Ray resources by name, `memory` in bytes. A trial gets as many
      threads as CPUs. On a cluster, its node has a GPU of the type and the `labels`.
    - `title` names what is trained, for Ray's dashboard.
    - `node_wait_s` is the time to wait for a node for the trials, in seconds. None depends on the
      cluster: no time at first on a fixed one, half an hour on one that starts nodes on demand
      (`tuner.searches.crew`).
    - `local_gpus` are indices of GPUs of this machine. Without an address, a cluster with them is
      started here and stopped afterwards.
    - `tell` is called with a line for each address at which the search can be watched.
    """

    space: SearchSpace
    gpu: Gpu
    runner_factory: RunnerFactory
    options: SearchOptions = field(default_factory=SearchOptions)
    objectives: Sequence[Objective] = ()
    configurations: Sequence[Configuration] | None = None
    initial: Sequence[Configuration] = ()
    resume: Sequence[TrialRecord] = ()
    trial_device: TrialDevice | None = None
    predictions: Mapping[str, Prediction] = field(default_factory=dict)
    margin_bytes: int | None = None
    node_wait_s: float | None = None
    local_gpus: Sequence[int] = ()
    resources_per_trial: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    labels: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    run_id: str = ""
    tell: Callable[[str], None] = lambda line: None
    versions: Mapping[str, str] = field(default_factory=outcome_versions)

    def __post_init__(self) -> None:
        """Raise `InputError` for invalid values."""
        options = self.options
        checked_searcher(options.searcher)
        if options.workers is not None and options.workers < 1:
            raise InputError(f"workers is {options.workers}, and must be at least 1")
        check_min_gain(options.min_gain, options.searcher)
        if self.objectives:
            check_objectives([objective.name for objective in self.objectives], options.searcher)
        _ = self.budget

    @property
    def budget(self) -> Budget:
        """The limits of the search. Raises `InputError` for invalid ones."""
        return Budget(self.options, self.gpu.price_usd_per_hour)

    @property
    def candidates(self) -> list[Configuration]:
        """The configurations to choose from, in the order of the space."""
        if self.configurations is not None:
            return list(self.configurations)
        return list(self.space.configurations(self.options.where))

    @property
    def gpus_per_trial(self) -> float:
        """Number of devices that one trial occupies: a processor counts 1, an emulated device 0."""
        if self.trial_device is None or self.trial_device.emulated:
            return 0.0
        return self.resources_per_trial.get("GPU", 1.0)

    def is_known(self, record: TrialRecord) -> bool:
        """True if the record is as good as running its configuration again."""
        return (
            record.outcome.status is not Status.INTERRUPTED
            and record.space == self.space.name
            and record.gpu == self.gpu.id
            and record.gpu_memory_bytes == self.gpu.memory_bytes
            and all(record.versions.get(name) == v for name, v in self.versions.items())
            and ran_alike(record, self.trial_device)
        )

    def is_stale(self, record: TrialRecord) -> bool:
        """True if only its library versions keep the record from being known: it is a hint.

        A record of another architecture under the same model name is no hint.
        """
        then = {**record.versions, **self.versions}
        then["model"] = record.versions.get("model", "")
        return (
            not self.is_known(record)
            and then["model"] == self.versions.get("model", "")
            and self.is_known(dataclasses.replace(record, versions=then))
        )


def check_min_gain(min_gain: float | None, searcher: str) -> None:
    """Raise `InputError` for a minimum gain if `searcher` does not estimate its gain."""
    if min_gain is not None and searcher != DEFAULT_SEARCHER:
        raise InputError(
            f"searcher {searcher!r} does not estimate its gain",
            hint=f"search with {DEFAULT_SEARCHER!r}, or without a minimum gain",
        )


def check_objectives(names: Sequence[str], searcher: str) -> None:
    """Raise `InputError` if `searcher` does not support these objectives."""
    usual = {objective.name for objective in DEFAULT_OBJECTIVES}
    if searcher != DEFAULT_SEARCHER and not usual.issuperset(names):
        raise InputError(
            f"searcher {searcher!r} searches for throughput and memory only",
            hint=f"{DEFAULT_SEARCHER!r} with predictions searches for others; "
            "--objective of `tuner show` draws other fronts of any trials",
        )


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """Result of a search. `records` holds the reused records, then those of this search."""

    records: tuple[TrialRecord, ...]
    reused: int
    candidates: int
    """Number of valid configurations to choose from."""
    stopped_by: StoppedBy
    duration_s: float
    pruned: tuple[Pruned, ...] = ()
    """Configurations that were held back, including revived ones."""
    stale: int = 0
    """Number of trials with other library versions that were hints; they are not in `records`."""
    failure: TunerError | None = None
    """The error that ended this one of several searches; `records` holds the trials before it."""
    traced: int | None = None
    """Number of configurations traced in full by a search without trials; else None."""
    warnings: tuple[str, ...] = ()
    """Warnings for the user: workers that could run no trial, and configurations that were not
    tried because of failed trials or predictions."""

    @property
    def interrupted(self) -> bool:
        """True if the user interrupted the search."""
        return self.stopped_by is StoppedBy.INTERRUPTED

    @property
    def counts(self) -> Mapping[Status, int]:
        """Number of records by status; a status that did not occur counts 0."""
        return Counter(record.outcome.status for record in self.records)
