"""`python -m benchmarks.search.in_ray`: what Ray adds to a decision, with trials that do nothing.

A whole search as `tuner search` runs it, one trial at a time, whose runner answers at once. What
passes between the end of one trial and the end of the next is the driver's decision and Ray's
share: passing the trial to the warm worker, the worker's answer, and the controller's own
rounds. The decision is timed by itself; the rest is Ray's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.search.decisions import SAMPLERS, predicted
from benchmarks.search.samplers import CLASSES
from tuner.core.records import Configuration, Outcome, Prediction, Source, Status
from tuner.searches.ray.driver import search
from tuner.searches.request import SearchRequest
from tuner.searches.state import SearchState
from tuner.space import load_space
from tuner.space.gpus import get_gpu
from tuner.trial.base import PLAIN, Instructions

LAST = 50
"""Trials at the end of each search that are counted."""


@dataclass(frozen=True)
class Echo:
    """A runner and the factory of it: each trial comes to its prediction at once."""

    gpu_id: str
    source: Source = Source.PREDICTED

    def __call__(self) -> Echo:
        """Itself."""
        return self

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        """What a formula says."""
        prediction: Prediction = predicted(configuration, get_gpu(self.gpu_id))
        return Outcome(Status.OK, prediction=prediction, duration_s=1e-6)


def main() -> None:
    """Print milliseconds per trial for each sampler, and whose they are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.in_ray")
    parser.add_argument("--space", default="qlora27b")
    parser.add_argument("--gpu", default="a100_80gb")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=["guided", "random"])
    parser.add_argument("--study", action="store_true", help="with the study in a file too")
    arguments = parser.parse_args()
    print(f"medians of the last {LAST} of {arguments.trials} trials, in milliseconds")
    print(f"{'sampler':10} {'between trials':>15} {'decision':>10} {'Ray':>10}")
    for sampler in arguments.samplers:
        between, decision = timed(
            arguments.space, arguments.gpu, sampler, arguments.trials, study=arguments.study
        )
        print(
            f"{sampler:10} {between:15.1f} {decision:10.1f} {between - decision:10.1f}", flush=True
        )


def timed(
    space_name: str, gpu_id: str, sampler: str, trials: int, *, study: bool
) -> tuple[float, float]:
    """Milliseconds between the ends of two trials, and those of the decision among them."""
    space, gpu = load_space(space_name), get_gpu(gpu_id)
    ended: list[float] = []
    clock = Clock()
    with TemporaryDirectory() as folder, clock.on(SearchState, "propose", "end"):
        search(
            SearchRequest(
                space=space,
                gpu=gpu,
                runner_factory=Echo(gpu_id),
                trials=trials,
                searcher=CLASSES.get(sampler, sampler),
                predictions={c.key: predicted(c, gpu) for c in space.configurations()},
                workload=space.workload,
                max_concurrent=1,
                study_path=Path(folder) / "study" if study else None,
                versions={},
            ),
            on_record=lambda record: ended.append(time.perf_counter()),
        )
    between = [now - then for then, now in pairwise(ended[-LAST - 1 :])]
    decisions = [clock.between(then, now) for then, now in pairwise(ended[-LAST - 1 :])]
    return 1e3 * float(np.median(between)), 1e3 * float(np.median(decisions))


class Clock:
    """Notes how long the calls of some methods took, and when they began."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, float]] = []

    def between(self, start: float, end: float) -> float:
        """Seconds of the calls between two moments, cut off at them."""
        parts = (min(b, end) - max(a, start) for a, b in self._calls if b > start and a < end)
        return sum(parts)

    @contextlib.contextmanager
    def on(self, owner: type, *names: str) -> Iterator[None]:
        """Time these methods inside."""
        before = {name: getattr(owner, name) for name in names}
        for name, method in before.items():
            setattr(owner, name, self._timed(method))
        try:
            yield
        finally:
            for name, method in before.items():
                setattr(owner, name, method)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self._calls.append((started, time.perf_counter()))

        return timed


if __name__ == "__main__":
    main()
