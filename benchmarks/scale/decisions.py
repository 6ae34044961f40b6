"""The decisions of a search alone, without Ray: what they cost as trials become more.

A decision is all that the driver does itself for a trial: the ledger proposes it, with as many
others running as there are workers, notes that it starts, and takes its outcome.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping

from benchmarks.scale.world import DEVICE, GPU, ScaleSpace, predicted, scattered
from tuner.records import Configuration, Prediction
from tuner.runner.base import TrialRunner
from tuner.tune.driver import make_proposer, quiet_optuna
from tuner.tune.ledger import Ledger
from tuner.tune.request import Bench, SearchRequest


def no_runner() -> TrialRunner:
    """Nothing runs here."""
    raise NotImplementedError


def request_of(trials: int, searcher: str) -> SearchRequest:
    """A search of the whole space, of trials that are measured."""
    predictions: Mapping[str, Prediction] = {
        c.key: predicted(c) for c in ScaleSpace().configurations()
    }
    return SearchRequest(
        space=ScaleSpace(),
        gpu=GPU,
        runner_factory=no_runner,
        trials=trials,
        searcher=searcher,
        bench=Bench(DEVICE),
        predictions=predictions,
        workload="causal_lm",
        versions={},
        run_id="scale",
    )


def decide(
    request: SearchRequest, workers: int, on_trial: Callable[[float], None] = lambda s: None
) -> list[float]:
    """CPU seconds of the decisions for each trial, in the order in which trials ended."""
    found: list[float] = []
    running: deque[tuple[str, Configuration, float]] = deque()
    with quiet_optuna():
        ledger = Ledger(
            dataclasses.replace(request),
            make_proposer(request),
            on_record=lambda record: None,
            on_progress=lambda progress: None,
        )
        number = 0
        while True:
            while len(running) < workers and not ledger.finished:
                name = f"t{number}"
                started = time.process_time()
                configuration = ledger.propose(name)
                if configuration is None:
                    break
                ledger.start(name)
                running.append((name, configuration, time.process_time() - started))
                number += 1
            if not running:
                break
            name, configuration, taken_s = running.popleft()
            outcome = scattered(configuration, request.predictions[configuration.key])
            started = time.process_time()
            ledger.end(name, outcome)
            found.append(taken_s + time.process_time() - started)
            on_trial(found[-1])
    for failure in (getattr(ledger, "failure", None), getattr(ledger, "broken", None)):
        if failure is not None:
            raise failure
    return found
