"""Runs the searches of several GPU types. Imports Ray and Optuna: to be imported late."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from tuner.records import TrialRecord
from tuner.tune.driver import search
from tuner.tune.progress import Progress
from tuner.tune.request import SearchRequest, SearchResult


def search_all(
    requests: Sequence[SearchRequest],
    *,
    on_progress: Callable[[Sequence[Progress]], None],
    on_record: Callable[[TrialRecord], None],
) -> tuple[SearchResult, ...]:
    """One search after the other."""
    states = [_not_begun(request) for request in requests]
    results: list[SearchResult] = []
    started_s = time.monotonic()
    for number, request in enumerate(requests):

        def progress(state: Progress, number: int = number) -> None:
            states[number] = state
            on_progress(states)

        if request.time_limit_s is not None:
            left_s = max(request.time_limit_s - (time.monotonic() - started_s), 1e-3)
            request = dataclasses.replace(request, time_limit_s=left_s)  # noqa: PLW2901
        results.append(search(request, on_progress=progress, on_record=on_record))
    return tuple(results)


def _not_begun(request: SearchRequest) -> Progress:
    return Progress(
        done=0, running=0, oom=0, failed=0, reused=0, total=request.trials,
        best=None, elapsed_s=0.0, eta_s=None,
    )  # fmt: skip
