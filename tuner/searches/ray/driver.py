"""Runs searches: a proposer chooses trials, and Ray Tune's workers run them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from ray import tune

from tuner.core.errors import InputError, UnavailableError
from tuner.core.files import scratch_folder
from tuner.core.records import Configuration, MemoryBudget, Prediction, TrialRecord
from tuner.core.setup.schemas import memory_order
from tuner.searches.candidates import Candidates
from tuner.searches.guided.goals import goals_of
from tuner.searches.interrupts import Interrupts
from tuner.searches.progress import Progress, StoppedBy
from tuner.searches.proposer import Proposer
from tuner.searches.ray import cluster
from tuner.searches.ray.callbacks import (
    HaltStopper,
    NoTrialProgress,
    RequestedResources,
    StateCallback,
    StateScheduler,
    StateSearcher,
)
from tuner.searches.ray.metrics import SearchMetrics
from tuner.searches.ray.private import (
    grows,
    is_own,
    losses_said,
    lost_process,
    placement_groups_left,
    require_alive,
)
from tuner.searches.ray.rooms import (
    FIXED_CLUSTER,
    GROWING_CLUSTER,
    OWN_CLUSTER,
    Capacity,
    ConcurrentSearches,
    PlaceholderDemand,
    Waiting,
    first_broken,
)
from tuner.searches.ray.worker import REQUEST, WorkerPlan, trainable_of
from tuner.searches.request import SearchOutcome, SearchRequest
from tuner.searches.state import SearchState
from tuner.searches.strategies import Knowledge, open_mirror

STOP_REACHES_ALL_S = 1.0
"""Time until a stop signal has reached all processes of a job, on a loaded machine."""
LOOK_AGAIN_S = 0.05


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
    called in this thread; their exceptions end all searches and are raised here. `address`,
    `local_gpus` and `time_limit_s` must be the same in all requests.

    A search that cannot continue (no node for its trials, or workers with other GPUs than their
    nodes declare) ends with a `failure` in its result, and the others continue.

    The first SIGINT or SIGTERM gives up the running trials and returns the results so far; the
    second raises KeyboardInterrupt. After the time limit no trial starts, and running ones may end.

    Raises `InputError` if a request has no valid configuration, and `UnavailableError` if there is
    no Ray at the address, it does not start, or it is lost meanwhile.
    """
    run_id = uuid.uuid4().hex[:8]
    requests = [dataclasses.replace(r, run_id=r.run_id or run_id) for r in requests]
    metrics = SearchMetrics(requests)

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
    configurations = list(request.space.configurations(request.where))
    if not configurations:
        conditions = " and ".join(request.where)
        raise InputError(
            f"space {request.space.name!r} has no valid configuration"
            + (f" with {conditions}" if conditions else ""),
            hint="relax the conditions",
        )
    predictions = _of_each(configurations, request.predictions)
    mirror = None
    if request.study_path is not None:
        mirror = open_mirror(request.study_path, f"{request.space.name}-{request.gpu.id}")
    return Proposer(
        Candidates(configurations, tuple(request.space.knobs)),
        sampler=request.searcher,
        seed=request.seed,
        trials=request.trials,
        initial=request.initial,
        mirror=mirror,
        knowledge=Knowledge(
            predictions,
            memory_order(request.workload, request.space.memory),
            goals_of(request.objectives, configurations, predictions) if predictions else (),
            MemoryBudget(request.gpu.memory_bytes, request.margin_bytes or 0),
            repeats=request.trial_device is not None and not request.trial_device.emulated,
        ),
    )


def _of_each(
    configurations: Sequence[Configuration], predictions: Mapping[str, Prediction]
) -> list[Prediction]:
    """The predictions in the order of the configurations; empty unless all have one."""
    found = [predictions[c.key] for c in configurations if c.key in predictions]
    return found if len(found) == len(configurations) else []


def _run(
    requests: Sequence[SearchRequest], states: Sequence[SearchState], metrics: SearchMetrics
) -> None:
    """Connect to Ray and run trials; return when all searches are over."""

    def interrupt() -> None:
        for state in states:
            state.interrupt()

    interrupts = Interrupts(interrupt)

    def leaving() -> bool:
        interrupted = all(state.stopped_by is StoppedBy.INTERRUPTED for state in states)
        return is_own() and (interrupted or lost_process() is not None)

    first = requests[0]
    with (
        interrupts.handled(),
        cluster.quiet(),
        scratch_folder() as folder,
        placement_groups_left(leaving),
        cluster.connected(
            first.address,
            cpus=max(cluster.cpus_for(r.max_concurrent, r.resources_per_trial) for r in requests),
            gpus=first.local_gpus,
            undisturbed=interrupts.deferred,
            watch=first.watch,
        ),
    ):
        metrics.begin()
        growing = first.address is not None and grows()
        searches = ConcurrentSearches(
            requests,
            states,
            Capacity(),
            waiting=_waiting(first.address, growing=growing),
            demand=PlaceholderDemand() if growing else None,
            on_decision=lambda index, seconds: metrics.decided(requests[index].gpu.id, seconds),
        )
        if not searches.over:
            with _given_up(searches), losses_said():
                _run_trials(requests, searches, folder)
                if any(state.failure for state in states):
                    require_alive()  # a lost Ray would be the actual reason
        metrics.progress(tuple(state.progress for state in states), now=True)


@contextlib.contextmanager
def _given_up(searches: ConcurrentSearches) -> Iterator[None]:
    """Ignore the loss of Ray in the block if the search is stopped: a job's signal stops Ray too.

    The signal may reach Ray's processes first, so that the loss is noticed before the stop.
    """
    try:
        yield
    except UnavailableError:
        until_s = time.monotonic() + STOP_REACHES_ALL_S
        while not searches.interrupted and time.monotonic() < until_s:
            time.sleep(LOOK_AGAIN_S)  # the handler of the signal runs meanwhile
        if not searches.interrupted:
            raise


def _waiting(address: str | None, *, growing: bool) -> Waiting:
    if address is None:
        return OWN_CLUSTER
    return GROWING_CLUSTER if growing else FIXED_CLUSTER


def _run_trials(
    requests: Sequence[SearchRequest], searches: ConcurrentSearches, folder: Path
) -> None:
    needed = [dict(request.resources_per_trial) for request in requests]
    plans = tuple(
        WorkerPlan(request.runner_factory, threads=max(1, int(resources.get("CPU", 1))))
        for request, resources in zip(requests, needed, strict=True)
    )
    trainable = tune.with_resources(
        trainable_of(plans),
        functools.partial(_resources_of, needed=needed),
    )
    stopper, scheduler = HaltStopper(), StateScheduler(searches)
    # `tune.run` and not `tune.Tuner`, which pickles the searcher into a file: nothing is ever
    # restored from it, and the callbacks of a search cannot be pickled.
    tune.run(
        trainable,
        name="search",
        search_alg=StateSearcher(searches),
        scheduler=scheduler,
        stop=stopper,
        callbacks=[StateCallback(searches, stopper, scheduler), NoTrialProgress()],
        num_samples=-1,
        reuse_actors=True,
        # The states count lost workers and run their trials again. Ray would count the loss of an
        # idle worker twice, and leave its trial hanging.
        max_failures=0,
        raise_on_failed_trial=False,
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        storage_path=str(folder),
        trial_dirname_creator=lambda trial: str(trial.trial_id),
        verbose=0,
    )


def _resources_of(
    config: Mapping[str, Any], *, needed: Sequence[Mapping[str, float]]
) -> RequestedResources:
    """The resources of the trial with this configuration."""
    index = config[REQUEST]
    return RequestedResources(needed[index], index)


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Let Optuna log only errors inside the block."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
