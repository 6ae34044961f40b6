"""Runs a search: Optuna proposes, workers of Ray Tune run the trials, records come out."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import optuna
from ray import tune

from tuner.errors import InputError
from tuner.records import Configuration, Prediction, TrialRecord
from tuner.tune import cluster
from tuner.tune.candidates import Candidates
from tuner.tune.guided_goals import goals_of
from tuner.tune.interrupts import Interrupts
from tuner.tune.ledger import Ledger
from tuner.tune.progress import Progress
from tuner.tune.proposer import Knowledge, Proposer, open_mirror
from tuner.tune.request import SearchRequest, SearchResult
from tuner.tune.searcher import HaltStopper, LedgerCallback, LedgerSearcher
from tuner.tune.trainable import TrialTrainable
from tuner.workloads.memory_order import memory_order

RETRIES_OF_A_LOST_WORKER = 1


def search(
    request: SearchRequest,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_record: Callable[[TrialRecord], None] = lambda record: None,
) -> SearchResult:
    """Run trials until the budget, the time or the space is used up, or the user interrupts.

    `on_record` gets each new record as soon as its trial ends, for the journal; `on_progress`
    is called at each change and about once a second. Both are called in this thread; what
    they raise ends the search and is raised here.

    The first SIGINT or SIGTERM gives up the trials that run and returns what is there; the
    second raises KeyboardInterrupt. Once the time limit is over no trial starts, and those
    that run may end.

    Raises `InputError` when no configuration is valid, `UnavailableError` when there is no
    Ray at the address, and the `TunerError` of a runner that cannot work.
    """
    request = dataclasses.replace(request, run_id=request.run_id or uuid.uuid4().hex[:8])
    with quiet_optuna():
        ledger = Ledger(
            request, make_proposer(request), on_record=on_record, on_progress=on_progress
        )
        ledger.reuse()
        ledger.report()
        if ledger.stopped_by is None and ledger.failure is None:
            _run(request, ledger)
    if ledger.failure is not None:
        raise ledger.failure
    assert ledger.stopped_by is not None
    return SearchResult(
        records=ledger.records,
        reused=ledger.reused,
        candidates=ledger.candidate_count,
        stopped_by=ledger.stopped_by,
        duration_s=ledger.elapsed_s,
        pruned=ledger.pruned,
        stale=ledger.stale,
    )


def make_proposer(request: SearchRequest) -> Proposer:
    """What proposes the trials of `request`. Raises `InputError` when nothing can be tried."""
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
            memory_order(request.workload),
            goals_of(request.objectives, configurations, predictions) if predictions else (),
        ),
    )


def _of_each(
    configurations: Sequence[Configuration], predictions: Mapping[str, Prediction]
) -> list[Prediction]:
    """The predictions in the order of the configurations; none unless all are there."""
    found = [predictions[c.key] for c in configurations if c.key in predictions]
    return found if len(found) == len(configurations) else []


def _run(request: SearchRequest, ledger: Ledger) -> None:
    """Connect to Ray and run trials; returns when the ledger wants no more of them."""
    interrupts = Interrupts(ledger.interrupt)
    cpus = cluster.cpus_for(request.max_concurrent, request.resources_per_trial)
    with (
        interrupts.handled(),
        cluster.quiet(),
        cluster.scratch_folder() as folder,
        cluster.connected(
            request.address, cpus=cpus, gpus=request.local_gpus, undisturbed=interrupts.deferred
        ),
    ):
        if not ledger.halted:
            _run_trials(request, ledger, folder)


def _run_trials(request: SearchRequest, ledger: Ledger, folder: Path) -> None:
    resources = dict(request.resources_per_trial)
    trainable = tune.with_parameters(
        TrialTrainable,
        runner_factory=request.runner_factory,
        threads=max(1, int(resources.get("CPU", 1))),
    )
    stopper = HaltStopper()
    # `tune.run` and not `tune.Tuner`, which pickles the searcher into a file of its own; there
    # is nothing to restore from it, and the callbacks of a search cannot be pickled.
    tune.run(
        trainable,
        name="search",
        search_alg=LedgerSearcher(ledger),
        stop=stopper,
        callbacks=[LedgerCallback(ledger, stopper)],
        num_samples=-1,
        max_concurrent_trials=request.max_concurrent or cluster.room_for(resources),
        resources_per_trial=tune.PlacementGroupFactory([resources]),
        reuse_actors=True,
        max_failures=RETRIES_OF_A_LOST_WORKER,
        raise_on_failed_trial=False,
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        storage_path=str(folder),
        trial_dirname_creator=lambda trial: str(trial.trial_id),
        verbose=0,
    )


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna says nothing but errors meanwhile."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
