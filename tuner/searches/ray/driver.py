"""Runs searches: a proposer chooses trials, Ray Tune runs them, and metrics count them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optuna
from ray.exceptions import RayError
from ray.util.metrics import Counter, Gauge, Histogram

from tuner.core.errors import InputError
from tuner.core.files import scratch_folder
from tuner.core.gpu import Gpu
from tuner.core.meanwhile import environment, log_level
from tuner.core.records import MemoryBudget, Source, TrialRecord
from tuner.core.setup.schemas import memory_order
from tuner.searches.candidates import Candidates
from tuner.searches.crew import Crew, lost_ray
from tuner.searches.front import device_bytes, hypervolume, samples_per_s
from tuner.searches.guided.goals import goals_of
from tuner.searches.interrupts import Interrupts
from tuner.searches.progress import Progress
from tuner.searches.proposer import Proposer
from tuner.searches.ray import cluster, tuning
from tuner.searches.ray.cluster import PlaceholderDemand, nodes_of_ray
from tuner.searches.request import SearchOutcome, SearchRequest
from tuner.searches.state import SearchState, first_broken
from tuner.searches.strategies import Knowledge, open_mirror


def search(
    request: SearchRequest,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_record: Callable[[TrialRecord], None] = lambda record: None,
) -> SearchOutcome:
    """Run trials until the budget, the time or the space is used up, or the user interrupts.

    This is `search_all` with one request, but the failure of the search is raised.

    Raises `InputError` if no configuration is valid, `UnavailableError` if there is no Ray at the
    address or no node for the trials, and the `TunerError` of a runner that can run no trial.
    """
    (result,) = search_all(
        [request], on_progress=lambda progress: on_progress(progress[0]), on_record=on_record
    )
    if result.failure is not None:
        raise result.failure
    return result


def search_all(
    requests: Sequence[SearchRequest],
    *,
    on_progress: Callable[[Sequence[Progress]], None] = lambda progress: None,
    on_record: Callable[[TrialRecord], None] = lambda record: None,
) -> tuple[SearchOutcome, ...]:
    """Run several searches at once on one cluster; return results in the order of `requests`.

    `on_record` gets each new record as soon as its trial ends, for the journal of its GPU type;
    `on_progress` gets the progress of all at each change and about once a second. Both are
    called in this thread; their exceptions end all searches and are raised here. The address,
    the time limit and `local_gpus` must be the same in all requests.

    A search that cannot continue (no node for its trials, or workers with other GPUs than their
    nodes declare) ends with a `failure` in its result, and the others continue.

    The first SIGINT or SIGTERM gives up the running trials and returns the results so far; the
    second raises KeyboardInterrupt. At the time limit running trials are given up.

    Raises `InputError` if a request has no valid configuration, and `UnavailableError` if there is
    no Ray at the address, it does not start, or it is lost meanwhile.
    """
    run_id = uuid.uuid4().hex[:8]
    requests = [dataclasses.replace(r, run_id=r.run_id or run_id) for r in requests]
    metrics = _SearchMetrics(requests)

    def record(new: TrialRecord) -> None:
        on_record(new)
        metrics.record(new)

    def progress(progresses: Sequence[Progress]) -> None:
        on_progress(progresses)
        metrics.progress(progresses)

    with quiet_optuna():
        states = _states(requests, record, progress)
        for state in states:
            state.reuse()
        states[0].report()
        if not all(state.over for state in states) and not first_broken(states):
            _run(requests, states, metrics)
    if broken := first_broken(states):
        raise broken
    return tuple(state.result() for state in states)


def _states(
    requests: Sequence[SearchRequest],
    on_record: Callable[[TrialRecord], None],
    on_progress: Callable[[Sequence[Progress]], None],
) -> list[SearchState]:
    """A state for each request; a change in one reports the progress of all."""
    states: list[SearchState] = []

    def tell(_: Progress) -> None:
        on_progress(tuple(state.progress for state in states))

    states += [
        SearchState(request, proposer_of(request), on_record=on_record, on_progress=tell)
        for request in requests
    ]
    return states


def proposer_of(request: SearchRequest) -> Proposer:
    """The proposer of the trials of `request`. Raises `InputError` without configurations."""
    options = request.options
    configurations = request.candidates
    if not configurations:
        conditions = " and ".join(options.where)
        raise InputError(
            f"space {request.space.name!r} has no valid configuration"
            + (f" with {conditions}" if conditions else ""),
            hint="relax the conditions",
        )
    known = request.predictions
    predictions = [known[c.key] for c in configurations if c.key in known]
    if len(predictions) < len(configurations):
        predictions = []
    mirror = None
    if options.study is not None:
        mirror = open_mirror(options.study, f"{request.space.name}-{request.gpu.id}")
    return Proposer(
        Candidates(configurations, tuple(request.space.knobs)),
        sampler=options.searcher,
        seed=options.seed,
        trials=options.trials,
        initial=request.initial,
        mirror=mirror,
        knowledge=Knowledge(
            predictions,
            memory_order(request.space.workload, request.space.memory),
            goals_of(request.objectives, configurations, predictions) if predictions else (),
            MemoryBudget(request.gpu.memory_bytes, request.margin_bytes or 0),
            repeats=request.trial_device is not None and not request.trial_device.emulated,
        ),
    )


def _run(
    requests: Sequence[SearchRequest], states: Sequence[SearchState], metrics: _SearchMetrics
) -> None:
    """Connect to Ray and run trials; return when all searches are over."""

    def interrupt() -> None:
        for state in states:
            state.interrupt()

    interrupts = Interrupts(interrupt)
    first = requests[0]
    with (
        interrupts.handled(),
        cluster.quiet(),
        environment(tuning.ENVIRONMENT),
        log_level(logging.CRITICAL, ["ray.tune"]),
        scratch_folder() as folder,
        cluster.connected(
            first.options,
            cpus=max(cluster.cpus_for(r.options.workers, r.resources_per_trial) for r in requests),
            gpus=first.local_gpus,
            undisturbed=interrupts.deferred,
            tell=first.tell,
        ),
    ):
        metrics.begin()
        try:
            nodes = nodes_of_ray()
            nodes.refresh(wait=True)
            growing = first.options.address is not None and nodes.grows()
            demand = PlaceholderDemand().show if growing else None
            crew = Crew(requests, states, nodes, demand=demand, on_decision=metrics.decided)
            if not crew.over:
                tuning.run(crew, folder)
        except RayError as error:
            raise lost_ray(str(error).strip().splitlines()[0]) from error
        metrics.progress(tuple(state.progress for state in states), now=True)


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Let Optuna log only errors inside the block."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


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
    "tuner_held_back": "Configurations that are not tried, as they would not fit or would fail.",
    "tuner_hypervolume": "Area under the front, in samples/s x bytes, to 0 and the GPU's memory.",
}
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "tuner_trial_memory_ratio": ("Peak device memory of a trial / the GPU's memory.", SHARES)
}
MORE_TAGS: Mapping[str, tuple[str, ...]] = {"tuner_trials": ("outcome", "source")}


class _SearchMetrics:
    """Updates the metrics of the searches of several GPU types, in the order of `requests`.

    Nothing is counted before `begin`. A call takes no longer late in a search than at its start.
    """

    def __init__(
        self, requests: Sequence[SearchRequest], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gpus = [request.gpu for request in requests]
        self._tags = {
            request.gpu.id: {
                "space": request.space.name,
                "gpu": request.gpu.id,
                "run": request.run_id,
            }
            for request in requests
        }
        self._ratios: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._of_ray: dict[str, Any] = {}
        self._clock = clock
        self._shown_s: float | None = None

    def begin(self) -> None:
        """Count from now on. Call it after Ray is initialised."""
        for name, text in COUNTERS.items():
            self._of_ray[name] = Counter(name, text, TAGS + MORE_TAGS.get(name, ()))
        for name, text in GAUGES.items():
            self._of_ray[name] = Gauge(name, text, TAGS)
        for name, (text, ends) in HISTOGRAMS.items():
            self._of_ray[name] = Histogram(name, text, list(ends), TAGS)

    def record(self, record: TrialRecord) -> None:
        tell = self._of_ray
        if not tell:
            return
        tags, outcome = self._tags[record.gpu], record.outcome
        which = {"outcome": str(outcome.status), "source": str(record.source)}
        tell["tuner_trials"].inc(1, {**tags, **which})
        evidence = outcome.evidence
        if evidence is not None:
            share = evidence.memory.device_bytes / record.gpu_memory_bytes
            tell["tuner_trial_memory_ratio"].observe(share, tags)
        if record.source is Source.MEASURED and outcome.duration_s > 0:
            tell["tuner_trial_seconds"].inc(outcome.duration_s, tags)
        for name, ratio in _ratios(record).items():
            total = self._ratios[record.gpu, name]
            total[0] += ratio
            total[1] += 1

    def decided(self, gpu: str, seconds: float) -> None:
        """Count a decision on the next trial, which took this many seconds."""
        if self._of_ray:
            self._of_ray["tuner_decisions"].inc(1, self._tags[gpu])
            self._of_ray["tuner_decision_seconds"].inc(max(seconds, 1e-9), self._tags[gpu])

    def progress(self, every: Sequence[Progress], *, now: bool = False) -> None:
        """Update the gauges, at most once in `PERIOD_S` unless `now`."""
        time_s = self._clock()
        if not self._of_ray:
            return
        if not now and self._shown_s is not None and time_s - self._shown_s < PERIOD_S:
            return
        self._shown_s = time_s
        for gpu, progress in zip(self._gpus, every, strict=True):
            self._show(gpu, progress)

    def _show(self, gpu: Gpu, progress: Progress) -> None:
        front, tags = progress.front, self._tags[gpu.id]
        best = front[-1] if front else None  # the front ends with its fastest
        ended = progress.done + progress.verified
        shown = {
            "tuner_trials_running": progress.running,
            "tuner_trials_done": progress.done,
            "tuner_trials_planned": progress.total,
            "tuner_elapsed_seconds": progress.elapsed_s,
            "tuner_oom_ratio": progress.oom / ended if ended else None,
            "tuner_best_samples_per_second": samples_per_s(best) if best else None,
            "tuner_best_device_bytes": device_bytes(best) if best else None,
            "tuner_gpu_memory_bytes": gpu.memory_bytes,
            "tuner_front_size": len(front),
            "tuner_held_back": progress.held_back,
            "tuner_hypervolume": hypervolume(front, reference=(0.0, float(gpu.memory_bytes))),
        }
        shown |= {
            n: total / count for (g, n), (total, count) in self._ratios.items() if g == gpu.id
        }
        for name, value in shown.items():
            if value is not None:
                self._of_ray[name].set(value, tags)


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
