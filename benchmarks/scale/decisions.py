"""The decisions of a search alone, without Ray: what they cost as trials become more.

A decision is all that the driver does itself for a trial: the state proposes it, with as many
others running as there are workers, notes that it starts, and takes its outcome.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping

from benchmarks.scale.world import DEVICE, GPU, ScaleSpace, predicted, scattered
from tuner.core.records import Configuration, Prediction
from tuner.searches.ray.driver import proposer_of, quiet_optuna
from tuner.searches.request import SearchRequest, TrialDevice
from tuner.searches.state import SearchState
from tuner.trial.base import TrialRunner


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
        trial_device=TrialDevice(DEVICE),
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
        state = SearchState(
            dataclasses.replace(request),
            proposer_of(request),
            on_record=lambda record: None,
            on_progress=lambda progress: None,
        )
        number = 0
        while True:
            while len(running) < workers and not state.finished:
                name = f"t{number}"
                started = time.process_time()
                configuration = state.propose(name)
                if configuration is None:
                    break
                state.start(name)
                running.append((name, configuration, time.process_time() - started))
                number += 1
            if not running:
                break
            name, configuration, taken_s = running.popleft()
            outcome = scattered(configuration, request.predictions[configuration.key])
            started = time.process_time()
            state.end(name, outcome)
            found.append(taken_s + time.process_time() - started)
            on_trial(found[-1])
    for failure in (getattr(state, "failure", None), getattr(state, "broken", None)):
        if failure is not None:
            raise failure
    return found
