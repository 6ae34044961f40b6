"""A whole search with trials that do nothing, and what each of them costs the driver."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from benchmarks.scale.decisions import request_of
from benchmarks.scale.shared import sharing
from benchmarks.scale.world import Instant
from tuner.core.records import TrialRecord
from tuner.searches.journal import JournalWriter
from tuner.searches.ray.driver import search
from tuner.searches.state import SearchState

WINDOW = 250
"""Trials between two rows."""

CPU_SHARE = 0.01
"""Of a trial, so that all fit on a small machine; what limits them is their logical GPU."""


@dataclass(frozen=True)
class Row:
    """Means over the `WINDOW` trials that ended last, of `trials` that have.

    `driver_cpu_ms` is the time of all threads of the driver on a processor, per trial, with
    Ray's own; `decision_ms` the part of it in which the search decides and takes in outcomes.
    `resident_mib` is the memory of the driver then.
    """

    workers: int
    processes: str
    trials: int
    driver_cpu_ms: float
    decision_ms: float
    wall_ms: float
    resident_mib: float


class Gauge:
    """Takes a row after each window of trials."""

    def __init__(self, workers: int, processes: str) -> None:
        self.rows: list[Row] = []
        self._workers, self._processes = workers, processes
        self._trials = 0
        self._deciding_s = 0.0
        self._then = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.process_time(), self._deciding_s, time.perf_counter()

    def trial(self, record: TrialRecord) -> None:
        """A trial ended."""
        self._trials += 1
        if self._trials % WINDOW:
            return
        now = self._now()
        cpu, deciding, wall = (1e3 * (b - a) / WINDOW for a, b in zip(self._then, now, strict=True))
        resident = psutil.Process().memory_info().rss / 2**20
        self.rows.append(
            Row(self._workers, self._processes, self._trials, cpu, deciding, wall, resident)
        )
        self._then = now
        print(
            f"{self._workers:4} workers {self._trials:6} trials: {cpu:6.1f} ms of the driver's "
            f"CPU time a trial, {deciding:6.1f} of them decide; {resident:5.0f} MiB",
            flush=True,
        )

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """The decisions of states are timed inside."""
        before = {name: getattr(SearchState, name) for name in ("propose", "end")}

        def timed(method):
            def call(*arguments):
                started = time.thread_time()
                try:
                    return method(*arguments)
                finally:
                    self._deciding_s += time.thread_time() - started

            return call

        for name, method in before.items():
            setattr(SearchState, name, timed(method))
        try:
            yield
        finally:
            for name, method in before.items():
                setattr(SearchState, name, method)


def run(trials: int, workers: int, *, searcher: str, processes: bool) -> list[Row]:
    """The rows of one search with so many workers; each in a process of its own, if asked for."""
    request = dataclasses.replace(
        request_of(trials, searcher),
        runner_factory=Instant(),
        max_concurrent=workers,
        resources_per_trial={"GPU": 1.0, "CPU": CPU_SHARE},
        local_gpus=range(workers),
    )
    gauge = Gauge(workers, "own" if processes else "shared")
    shared = contextlib.nullcontext() if processes else sharing()
    with (
        TemporaryDirectory() as folder,
        shared,
        gauge.timing(),
        JournalWriter(Path(folder) / "trials.jsonl") as journal,
    ):

        def record(new: TrialRecord) -> None:
            journal.append(new)
            gauge.trial(new)

        search(request, on_record=record)
    return gauge.rows
