"""Compiles structures and replays the allocator, in several processes at once."""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.estimators.compiler.compiled import CompiledPasses, Replays
from tuner.estimators.compiler.overhead import LARGEST_GPU_BYTES, Point, anchors, replay_all
from tuner.estimators.compiler.structure import Structure
from tuner.estimators.predict import Subject
from tuner.estimators.tracing.workspace import CUBLAS_WORKSPACE_BYTES

Answer = tuple[CompiledPasses | str, dict[Point, Replays]]
"""A compiled structure, or why there is none, and the replays that were asked for."""


@dataclass(frozen=True, slots=True)
class Request:
    """A structure with the points at which it is wanted; `passes` when it is compiled."""

    structure: Structure
    points: tuple[Point, ...]
    passes: CompiledPasses | str | None = None

    def missing(self, passes: CompiledPasses | str, known: Mapping[Point, Replays]) -> list[Point]:
        """Points at which the allocator has yet to be replayed."""
        if isinstance(passes, str):
            return []
        points = np.array(self.points, dtype=float)
        wanted = {place for places in anchors(points, passes).values() for place in places}
        unknown = sorted(wanted - known.keys())
        if not unknown:
            return []
        sizes = passes.rounded_bytes(np.array(unknown, dtype=float), CUBLAS_WORKSPACE_BYTES)
        peaks = passes.live_bytes(sizes).max(axis=0)
        return [p for p, peak in zip(unknown, peaks, strict=True) if peak <= LARGEST_GPU_BYTES]


def answers(
    requests: Sequence[Request],
    known: Mapping[Structure, dict[Point, Replays]],
    subject: Subject | None,
    *,
    workers: int,
) -> Iterable[tuple[Request, Answer]]:
    """What each request asks for, in the order in which it is done.

    `known` are the replays that there are; `subject` is needed where a structure is to be
    compiled. With fewer than two workers, or one request, this process does it.
    """
    if workers < 2 or len(requests) < 2:
        for request in requests:
            yield request, _answer(subject, request, known[request.structure])
        return
    # Forked after the imports, so that only this process pays for them.
    if any(request.passes is None for request in requests):
        _quieten_threads()
    with concurrent.futures.ProcessPoolExecutor(
        min(workers, len(requests)),
        mp_context=multiprocessing.get_context("fork"),
        initializer=_set_subject,
        initargs=(subject,),
    ) as pool:
        futures = {pool.submit(_answer_in_worker, r, known[r.structure]): r for r in requests}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()


def compile_one(subject: Subject, structure: Structure) -> CompiledPasses | str:
    """The compiled structure, or the reason why there is none."""
    from tuner.estimators.compiler.compile import compile_passes
    from tuner.estimators.compiler.layouts import CompileError

    try:
        return compile_passes(subject.workload, subject.model_config, structure)
    except CompileError as error:
        return str(error)


def _answer(subject: Subject | None, request: Request, known: Mapping[Point, Replays]) -> Answer:
    """Compile what is not compiled yet, and replay the allocator where it is not known."""
    passes = request.passes
    if passes is None:
        assert subject is not None
        passes = compile_one(subject, request.structure)
    if isinstance(passes, str):
        return passes, {}
    return passes, replay_all(passes, request.missing(passes, known))


_worker_subject: Subject | None = None
"""The subject of a compiling process; set once when the process starts."""


def _set_subject(subject: Subject | None) -> None:
    global _worker_subject  # noqa: PLW0603  (one job per process of the pool)
    _worker_subject = subject


def _answer_in_worker(request: Request, known: Mapping[Point, Replays]) -> Answer:
    return _answer(_worker_subject, request, known)


def _quieten_threads() -> None:
    """One torch thread a process: tensors without data need none, and forks need few."""
    import torch

    torch.set_num_threads(1)
    # What is imported stays: the collector of the forks need not look at it again.
    gc.collect()
    gc.freeze()


def default_workers() -> int:
    """Processes that compile at once: one per core this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
