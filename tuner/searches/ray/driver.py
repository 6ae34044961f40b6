"""Runs searches: a proposer chooses trials, and Ray Tune runs them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

import optuna
from ray.exceptions import RayError

from tuner.core.errors import InputError
from tuner.core.files import scratch_folder
from tuner.core.meanwhile import environment, log_level
from tuner.core.records import Configuration, MemoryBudget, Prediction, TrialRecord
from tuner.core.setup.schemas import memory_order
from tuner.searches.candidates import Candidates
from tuner.searches.crew import Crew, lost_ray
from tuner.searches.guided.goals import goals_of
from tuner.searches.interrupts import Interrupts
from tuner.searches.progress import Progress
from tuner.searches.proposer import Proposer
from tuner.searches.ray import cluster, tuning
from tuner.searches.ray.metrics import SearchMetrics
from tuner.searches.ray.nodes import PlaceholderDemand, nodes_of_ray
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
    options = request.options
    configurations = request.candidates
    if not configurations:
        conditions = " and ".join(options.where)
        raise InputError(
            f"space {request.space.name!r} has no valid configuration"
            + (f" with {conditions}" if conditions else ""),
            hint="relax the conditions",
        )
    predictions = _of_each(configurations, request.predictions)
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
