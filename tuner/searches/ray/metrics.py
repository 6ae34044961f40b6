"""Metrics of a search, which Ray exports to Prometheus.

Ray puts "ray_" before each name, and "_total" after the names of counters. Every metric has the
tags `space`, `gpu` and `run`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray.util.metrics import Counter, Gauge, Histogram

from tuner.core.records import Configuration, Source, Status, TrialRecord
from tuner.searches.front import device_bytes, hypervolume, pareto_front, samples_per_s
from tuner.searches.journal import latest
from tuner.searches.progress import Progress

PERIOD_S = 1.0
"""Minimum time between two updates of the gauges; Ray collects metrics every few seconds."""

TAGS = ("space", "gpu", "run")
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 1.0)
"""Upper ends of the histogram's classes of a trial's memory / the GPU's memory. Ray replaces each
value by the middle of its class, so the sum and mean of its histograms are not exact."""

COUNTERS: Mapping[str, str] = {
    "tuner_trials": "Finished trials, by outcome and source, without those of earlier searches.",
    "tuner_trial_seconds": "Time that measured trials took, in seconds.",
    "tuner_decisions": "Decisions on what to try next.",
    "tuner_decision_seconds": "Time that the search took to decide what to try, in seconds.",
}
GAUGES: Mapping[str, str] = {
    "tuner_trials_running": "Running trials.",
    "tuner_trials_done": "Finished trials, including those of earlier searches.",
    "tuner_trials_planned": "Planned trials, including those of earlier searches.",
    "tuner_elapsed_seconds": "Time since the search began, in seconds.",
    "tuner_oom_ratio": "Trials that ran out of memory, as a share of those that ended.",
    "tuner_best_samples_per_second": "Throughput of the fastest that fits, in samples/s.",
    "tuner_best_device_bytes": "Peak device memory of the fastest that fits, in bytes.",
    "tuner_gpu_memory_bytes": "Memory of the GPU type, in bytes.",
    "tuner_front_size": "Configurations on the front of throughput and memory.",
    "tuner_predicted_memory_ratio": "Predicted / measured peak device memory, mean of trials.",
    "tuner_predicted_throughput_ratio": "Predicted / measured samples/s, mean of trials.",
    "tuner_hypervolume": "Area under the front, in samples/s x bytes, to 0 and the GPU's memory.",
}
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "tuner_trial_memory_ratio": ("Peak device memory of a trial / the GPU's memory.", SHARES),
}
MORE_TAGS: Mapping[str, tuple[str, ...]] = {"tuner_trials": ("outcome", "source")}


class Instruments:
    """The metrics in this process. Create it after Ray is initialised."""

    def __init__(self) -> None:
        self._counters = {
            name: Counter(name, text, TAGS + MORE_TAGS.get(name, ()))
            for name, text in COUNTERS.items()
        }
        self._gauges = {name: Gauge(name, text, TAGS) for name, text in GAUGES.items()}
        self._histograms = {
            name: Histogram(name, text, list(ends), TAGS)
            for name, (text, ends) in HISTOGRAMS.items()
        }

    def count(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        """Add to a counter."""
        if value > 0:
            self._counters[name].inc(value, dict(tags))

    def show(self, name: str, value: float | None, tags: Mapping[str, str]) -> None:
        """Set a gauge, unless the value is unknown."""
        if value is not None:
            self._gauges[name].set(value, dict(tags))

    def observe(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        """Put a value into a histogram."""
        self._histograms[name].observe(value, dict(tags))


@dataclass(frozen=True, slots=True)
class Watched:
    """One GPU type of a search: its tags, and the memory of the GPU in bytes."""

    space: str
    gpu: str
    run: str
    memory_bytes: int

    @property
    def tags(self) -> Mapping[str, str]:
        """The tags of the metrics."""
        return {"space": self.space, "gpu": self.gpu, "run": self.run}


class SearchMetrics:
    """Updates the metrics of the searches of several GPU types, in the order of `watched`.

    The driver calls `record` and `progress` during the searches; a call takes no longer late in a
    search than at its start.
    """

    def __init__(
        self,
        watched: Sequence[Watched],
        *,
        instruments: Callable[[], Instruments] = Instruments,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched = {one.gpu: one for one in watched}
        self._numbers = {one.gpu: RunningSummary(one.memory_bytes) for one in watched}
        self._ratios: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._instruments = instruments()
        self._clock = clock
        self._shown_s: float | None = None

    def known(self, records: Iterable[TrialRecord]) -> None:
        """Add trials of earlier searches; they are not counted as trials of this one."""
        for record in records:
            self._numbers[record.gpu].add(record)

    def record(self, record: TrialRecord) -> None:
        """Count a trial that ended."""
        tags = self._watched[record.gpu].tags
        self._numbers[record.gpu].add(record)
        outcome, tell = record.outcome, self._instruments
        which = {"outcome": str(outcome.status), "source": str(record.source)}
        tell.count("tuner_trials", 1, {**tags, **which})
        evidence = outcome.evidence
        if evidence is not None:
            share = evidence.memory.device_bytes / record.gpu_memory_bytes
            tell.observe("tuner_trial_memory_ratio", share, tags)
        if record.source is Source.MEASURED:
            tell.count("tuner_trial_seconds", outcome.duration_s, tags)
        for name, ratio in _ratios(record).items():
            total = self._ratios[record.gpu, name]
            total[0] += ratio
            total[1] += 1

    def decided(self, gpu: str, seconds: float) -> None:
        """Count a decision on the next trial, which took this many seconds."""
        tags = self._watched[gpu].tags
        self._instruments.count("tuner_decisions", 1, tags)
        self._instruments.count("tuner_decision_seconds", seconds, tags)

    def progress(self, every: Sequence[Progress], *, now: bool = False) -> None:
        """Update the gauges, at most once in `PERIOD_S` unless `now`."""
        time_s = self._clock()
        if not now and self._shown_s is not None and time_s - self._shown_s < PERIOD_S:
            return
        self._shown_s = time_s
        for one, progress in zip(self._watched.values(), every, strict=True):
            self._show(one, progress)

    def _show(self, one: Watched, progress: Progress) -> None:
        numbers = self._numbers[one.gpu].numbers()
        for name, value in {
            "tuner_trials_running": progress.running,
            "tuner_trials_done": progress.done,
            "tuner_trials_planned": progress.total,
            "tuner_elapsed_seconds": progress.elapsed_s,
            "tuner_oom_ratio": numbers.oom_share,
            "tuner_best_samples_per_second": numbers.best_samples_per_s,
            "tuner_best_device_bytes": numbers.best_device_bytes,
            "tuner_gpu_memory_bytes": one.memory_bytes,
            "tuner_front_size": numbers.front_size,
            "tuner_hypervolume": numbers.hypervolume,
        }.items():
            self._instruments.show(name, value, one.tags)
        for (gpu, name), (total, count) in self._ratios.items():
            if gpu == one.gpu:
                self._instruments.show(name, total / count, one.tags)


def _ratios(record: TrialRecord) -> Mapping[str, float]:
    """Predicted / measured of one trial, by the metric's name; empty if either is missing."""
    measured, predicted = record.outcome.measurement, record.outcome.prediction
    if measured is None or predicted is None or record.verification or record.outcome.stage:
        return {}  # a verification also evaluates, and one stage is not what was predicted
    pairs = {
        "tuner_predicted_memory_ratio": (
            predicted.memory.device_bytes,
            measured.memory.device_bytes,
        ),
        "tuner_predicted_throughput_ratio": (
            predicted.speed.samples_per_s,
            measured.speed.samples_per_s,
        ),
    }
    return {name: said / found for name, (said, found) in pairs.items() if found}


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a search at one moment.

    `hypervolume` is that of the front of throughput and memory, in samples/s x bytes, with 0 and
    the GPU's memory as its reference. `best_samples_per_s` and `best_device_bytes` are those of the
    fastest that fits, None before there is one; `oom_share` is of all trials, None before the
    first.
    """

    trials: int
    oom_share: float | None
    best_samples_per_s: float | None
    best_device_bytes: int | None
    hypervolume: float
    front_size: int


class RunningSummary:
    """Follows the records of one GPU type.

    Adding a record takes the same time however many there were; the front is computed on request,
    from the previous front and the records since.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._runs: dict[Configuration, list[TrialRecord]] = {}
        self._fitting: dict[Configuration, TrialRecord] = {}
        self._new: list[TrialRecord] = []
        self._front: tuple[TrialRecord, ...] = ()
        self._again = False
        self._trials = self._oom = 0

    def add(self, record: TrialRecord) -> None:
        """Add a record; the records of one configuration are pooled, as in the results."""
        self._trials += 1
        self._oom += record.outcome.status is Status.OOM
        runs = self._runs.setdefault(record.configuration, [])
        runs.append(record)
        (together,) = latest(runs)
        before = self._fitting.pop(record.configuration, None)
        if together.fits:
            self._fitting[record.configuration] = together
            self._new.append(together)
        # Configurations that this one dominated may come back to the front.
        self._again = self._again or before is not None

    def numbers(self) -> Numbers:
        """The numbers now."""
        changed = self._fitting.values() if self._again else (*self._front, *self._new)
        if self._again or self._new:
            self._front = pareto_front(changed, limit_bytes=self._limit_bytes)
            self._new, self._again = [], False
        best = self._front[0] if self._front else None
        return Numbers(
            trials=self._trials,
            oom_share=self._oom / self._trials if self._trials else None,
            best_samples_per_s=samples_per_s(best) if best else None,
            best_device_bytes=device_bytes(best) if best else None,
            hypervolume=hypervolume(self._front, reference=(0.0, float(self._limit_bytes))),
            front_size=len(self._front),
        )
