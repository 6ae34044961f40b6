"""What a search is asked for and what it gives back: plain data, no Ray and no Optuna."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tuner.core.errors import InputError, TunerError, unknown
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, KnobValue, Prediction, Source, Status, TrialRecord
from tuner.searches.front import DEFAULT_OBJECTIVES, Objective
from tuner.searches.progress import Budget, StoppedBy
from tuner.searches.store import ResultsFolder, write_atomically
from tuner.searches.watch import Watch
from tuner.trial.base import RunnerFactory, outcome_versions


@dataclass(frozen=True, slots=True)
class Pruned:
    """A configuration that was held back, and the reason for people.

    `since` is the id of the trial after which it was, None before the first; `revived_by` is
    that of the trial which changed the verdict, None while the verdict stands.
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
    """Replace `pruned.jsonl` in one step; one line for each. Raises `UnavailableError`."""
    lines = [json.dumps(entry.to_dict(), separators=(",", ":")) + "\n" for entry in pruned]
    write_atomically(folder.path / "pruned.jsonl", "".join(lines).encode("ascii"))


SEARCHERS = ("guided", "tpe", "random", "grid")
"""By name; "package.module:Class" is any sampler of Optuna's kind."""
DEFAULT_SEARCHER = "guided"
"""It starts from predictions, where a request has some."""
DEFAULT_TRIALS = 40


def check_searcher(name: str) -> None:
    """Raise `InputError` unless a search can be made with the searcher of this name."""
    if name not in SEARCHERS and ":" not in name:
        raise unknown("searcher", name, (*SEARCHERS, "package.module:Class"))


class Space(Protocol):
    """The part of a search space that a search needs."""

    @property
    def name(self) -> str:
        """The name under which results are filed."""
        ...

    @property
    def knobs(self) -> Mapping[str, Any]:
        """The knobs by name; a search is free to move these and nothing else."""
        ...

    @property
    def memory(self) -> Mapping[str, tuple[KnobValue, ...]]:
        """Values of some knobs from least to most memory, all else the same."""
        ...

    def configurations(self, where: Sequence[str] = ()) -> Iterator[Configuration]:
        """All valid configurations that meet `where`, always in the same order."""
        ...


@dataclass(frozen=True, slots=True)
class TrialDevice:
    """The device on which the trials of a search run: a real one, or an `emulated` one.

    `device` is its exact name. `memory_limit_bytes` is what a trial may use of it; with one, a
    larger device can stand in for the GPU type that is searched.
    """

    device: str
    memory_limit_bytes: int | None = None
    emulated: bool = False

    def ran(self, record: TrialRecord) -> bool:
        """Whether the trial of `record` ran on this device under this limit."""
        device, other = record.device, record.emulated_device
        if self.emulated:
            device, other = other, device
        return (device, other, record.memory_limit_bytes) == (
            self.device,
            None,
            self.memory_limit_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """One search of one space for one GPU type.

    - `trials` counts those taken over from `resume` too, so that the same request repeated
      after an interruption ends where an undisturbed one would have.
    - `gpu_hours` and `max_cost_usd` limit the time on GPUs and its price, of those records too;
      `min_gain` ends the search "guided" once less is expected of every trial. See `Budget`.
    - `objectives` are what "guided" searches for, the first above all; none are throughput and
      memory, which the other searchers know alone.
    - `initial` is run first, in its order; what is not a valid configuration is passed over.
    - `resume` holds the journal; records of this space, GPU, memory and library versions are
      not run again but told to the searcher, where they come from the same trial_device.
    - `trial_device` is where trials run, for real or emulated; None for a preview, which runs none.
    - `predictions` by configuration key are what was said of configurations before: a measured
      trial's record carries its own beside the measurement, and the searcher "guided" starts
      from them if there is one of every valid configuration.
    - `workload` is its name; what it declares of its knobs keeps the searcher from what cannot fit.
    - `margin_bytes` is the memory to keep free, noted in the records of measured trials.
    - `verify` asks for a verification of what is to be recommended, beyond the budget of trials.
    - `max_concurrent` trials run at once; None means as many as the cluster has room for.
    - `resources_per_trial` are Ray resources by name. A trial gets as many threads as CPUs.
    - `node_wait_s` is how long a node for the trials is waited for, where none is there; None
      leaves it to the cluster: no time at first where nobody starts nodes, half an hour where they
      start on demand (`tuner.searches.ray.rooms`).
    - `address` of a running Ray cluster; None starts one here and stops it afterwards, with
      those GPUs of this machine that `local_gpus` lists by index.
    - `study_path` is a file in which the Optuna study is kept for other Optuna tools; it is
      derived from the journal and written anew by each search.
    - `watch` says how others can watch the search; it changes nothing of what the search does.
    """

    space: Space
    gpu: Gpu
    runner_factory: RunnerFactory
    trials: int = DEFAULT_TRIALS
    seed: int = 0
    time_limit_s: float | None = None
    gpu_hours: float | None = None
    max_cost_usd: float | None = None
    min_gain: float | None = None
    max_concurrent: int | None = None
    where: Sequence[str] = ()
    searcher: str = DEFAULT_SEARCHER
    objectives: Sequence[Objective] = ()
    initial: Sequence[Configuration] = ()
    resume: Sequence[TrialRecord] = ()
    study_path: Path | None = None
    trial_device: TrialDevice | None = None
    predictions: Mapping[str, Prediction] = field(default_factory=dict)
    workload: str = ""
    margin_bytes: int | None = None
    verify: bool = False
    node_wait_s: float | None = None
    address: str | None = None
    local_gpus: Sequence[int] = ()
    resources_per_trial: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    run_id: str = ""
    watch: Watch = field(default_factory=Watch)
    versions: Mapping[str, str] = field(default_factory=outcome_versions)

    def __post_init__(self) -> None:
        """Raise `InputError` for a value that no search can be made of."""
        check_searcher(self.searcher)
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise InputError(f"max_concurrent is {self.max_concurrent}, and must be at least 1")
        check_min_gain(self.min_gain, self.searcher)
        if self.objectives:
            check_objectives([objective.name for objective in self.objectives], self.searcher)
        _ = self.budget

    @property
    def budget(self) -> Budget:
        """What the search may spend. Raises `InputError` for what is none."""
        return Budget(
            trials=self.trials,
            time_limit_s=self.time_limit_s,
            gpu_hours=self.gpu_hours,
            max_cost_usd=self.max_cost_usd,
            usd_per_hour=self.gpu.price_usd_per_hour,
            min_gain=self.min_gain,
        )

    @property
    def gpus_per_trial(self) -> float:
        """Devices that one trial has for itself; a processor is one, an emulated one is none."""
        if self.trial_device is None or self.trial_device.emulated:
            return 0.0
        return self.resources_per_trial.get("GPU", 1.0)

    def is_known(self, record: TrialRecord) -> bool:
        """Whether running the record's configuration again would come to the same."""
        return (
            record.outcome.status is not Status.INTERRUPTED
            and record.space == self.space.name
            and record.gpu == self.gpu.id
            and record.gpu_memory_bytes == self.gpu.memory_bytes
            and all(record.versions.get(name) == v for name, v in self.versions.items())
            and self._same_source(record)
        )

    def is_stale(self, record: TrialRecord) -> bool:
        """Whether it would be known but for the versions of libraries: a hint, and no more.

        A model of another architecture under the same name is no hint.
        """
        then = {**record.versions, **self.versions}
        then["model"] = record.versions.get("model", "")
        return (
            not self.is_known(record)
            and then["model"] == self.versions.get("model", "")
            and self.is_known(dataclasses.replace(record, versions=then))
        )

    def _same_source(self, record: TrialRecord) -> bool:
        """Predicted and measured records are never reused for each other."""
        if self.trial_device is None:
            return record.source is Source.PREDICTED
        return self.trial_device.ran(record)


def check_min_gain(min_gain: float | None, searcher: str) -> None:
    """Raise `InputError` for a smallest gain where `searcher` does not say what it expects."""
    if min_gain is not None and searcher != DEFAULT_SEARCHER:
        raise InputError(
            f"searcher {searcher!r} does not estimate its gain",
            hint=f"search with {DEFAULT_SEARCHER!r}, or without a minimum gain",
        )


def check_objectives(names: Sequence[str], searcher: str) -> None:
    """Raise `InputError` where `searcher` cannot search for these objectives."""
    usual = {objective.name for objective in DEFAULT_OBJECTIVES}
    if searcher != DEFAULT_SEARCHER and not usual.issuperset(names):
        raise InputError(
            f"searcher {searcher!r} searches for throughput and memory only",
            hint=f"{DEFAULT_SEARCHER!r} with predictions searches for others; "
            "--objective of `tuner show` draws other fronts of any trials",
        )


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """What a search came to. `records` holds those taken over first, then those run now."""

    records: tuple[TrialRecord, ...]
    reused: int
    candidates: int
    """Number of valid configurations there were to choose from."""
    stopped_by: StoppedBy
    duration_s: float
    pruned: tuple[Pruned, ...] = ()
    """What was not tried because it cannot fit, with what was revived."""
    stale: int = 0
    """Number of trials by other versions of libraries that were hints, and are not in `records`."""
    failure: TunerError | None = None
    """Why it could not go on, where several searches ran together; `records` is what was done."""
    traced: int | None = None
    """Of a search without trials: how many configurations it traced in full."""
    warnings: tuple[str, ...] = ()
    """What the user should know: which workers could run no trial and why, and what was not tried
    because of trials that failed, or of predictions."""

    @property
    def interrupted(self) -> bool:
        """Whether the user broke it off."""
        return self.stopped_by is StoppedBy.INTERRUPTED

    @property
    def counts(self) -> Mapping[Status, int]:
        """Number of records by status; a status that did not occur counts 0."""
        return Counter(record.outcome.status for record in self.records)
