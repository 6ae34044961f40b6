"""Compiles structures, replays the allocator and traces, in several processes at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tuner.core.errors import UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Prediction
from tuner.cost.compiled import CompiledPasses, Replays
from tuner.cost.library_memory import CUBLAS_WORKSPACE_BYTES
from tuner.cost.sized import SizedTimeline
from tuner.predict.compiler.structure import (
    LARGEST_GPU_BYTES,
    Point,
    Structure,
    anchors,
    replay_all,
)
from tuner.predict.predict import Subject, Traces, predict

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
    """The parts of each request, in the order of work.

    `known` are the replays that there are; `subject` is needed where a structure is to be
    compiled. With fewer than two workers, or one request, this process does it.
    """
    yield from in_forks(
        _answer,
        [(request, known[request.structure]) for request in requests],
        subject,
        workers=workers,
        traces=any(request.passes is None for request in requests),
    )


def trace_all(
    subject: Subject,
    configurations: Sequence[Configuration],
    gpu: Gpu,
    traces: Traces,
    *,
    workers: int,
    **how: Any,
) -> list[Prediction]:
    """A prediction of each configuration at full depth, in their order; `how` as for `predict`.

    The structures that `traces` lacks come first, each once.
    """
    structures = {traces.structure(subject, each, gpu) for each in configurations}
    missing = [(each, None) for each in structures if each is not None and traces.lacks(each)]
    for structure, sized in in_forks(_sized, missing, (subject, traces), workers=workers):
        traces.keep(structure, sized)
    places = {configuration.key: place for place, configuration in enumerate(configurations)}
    items = [(configuration, (gpu, how)) for configuration in configurations]
    traced = in_forks(_predicted, items, (subject, traces), workers=workers)
    found = {places[configuration.key]: prediction for configuration, prediction in traced}
    return [found[place] for place in range(len(configurations))]


_AFTER_AUTOGRAD = "autograd's threading in combination with fork"
"""PyTorch's error in a fork of a process that has run a backward pass, in builds for GPUs
(torch/csrc/autograd/engine.cpp): a process that has traced something has to do the rest itself."""

_Subject = TypeVar("_Subject")
_Item = TypeVar("_Item")
_Known = TypeVar("_Known")
_Result = TypeVar("_Result")


def in_forks(
    function: Callable[[_Subject, _Item, _Known], _Result],
    items: Sequence[tuple[_Item, _Known]],
    subject: _Subject,
    *,
    workers: int,
    traces: bool = True,
) -> Iterator[tuple[_Item, _Result]]:
    """Each item with what `function` makes of it, as they are done; here if nothing is gained.

    Raises `UnavailableError` if one of the processes is killed.
    """
    if workers < 2 or len(items) < 2:
        for item, known in items:
            yield item, function(subject, item, known)
        return
    if traces:
        # Imported before the fork, so that only this process pays: bitsandbytes and peft as well.
        importlib.import_module("tuner.predict.compiler.compile")
        importlib.import_module("peft")
        _quieten_threads()
    left = []
    with _workers(min(workers, len(items)), subject) as pool:
        futures = {
            pool.submit(_in_worker, function, item, known): (item, known) for item, known in items
        }
        for future in concurrent.futures.as_completed(futures):
            try:
                result = future.result()
            except BrokenProcessPool as error:
                raise UnavailableError(
                    "a process that traces the model was killed, most likely for lack of memory",
                    hint="give this machine or container more memory (`dmesg` may name the "
                    "process); the same command goes on from finished traces",
                ) from error
            except RuntimeError as error:
                if _AFTER_AUTOGRAD not in str(error):
                    raise
                left.append(futures[future])
            else:
                yield futures[future][0], result
    for item, known in left:
        yield item, function(subject, item, known)


@contextlib.contextmanager
def _workers(count: int, subject: Any) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Forks of this process, which end with it, and at once where the block is left early.

    Whoever stops listening, Ctrl-C and SIGTERM too, wants nothing more: a structure takes minutes.
    """
    pool = concurrent.futures.ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(subject,),
    )
    try:
        yield pool
    except BaseException:
        # As `ProcessPoolExecutor.kill_workers` of Python 3.14.
        processes = list((pool._processes or {}).values())
        for process in processes:
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.join()
        raise
    pool.shutdown()


def compile_one(subject: Subject, structure: Structure) -> CompiledPasses | str:
    """The compiled structure, or the reason why there is none."""
    from tuner.predict.compiler.compile import compile_passes
    from tuner.predict.compiler.layouts import CompileError

    try:
        return compile_passes(subject.workload, subject.model_config, structure)
    except CompileError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the full trace raises what is wrong with the model
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _answer(subject: Subject | None, request: Request, known: Mapping[Point, Replays]) -> Answer:
    """Compile what is not compiled yet, and replay the allocator where it is not known."""
    passes = request.passes
    if passes is None:
        assert subject is not None
        passes = compile_one(subject, request.structure)
    if isinstance(passes, str):
        return passes, {}
    return passes, replay_all(passes, request.missing(passes, known))


_worker_subject: Any = None
"""The subject of a compiling process; set once when the process starts."""


def _begin(subject: Any) -> None:
    """Prepare a compiling process. It ignores signals for its parent, which ends it.

    Ctrl-C reaches the whole group, and `ray job stop` and schedulers send SIGTERM to every process
    of a job: the parent would find its pool broken before it could write what there is.
    """
    global _worker_subject  # noqa: PLW0603  (one job per process of the pool)
    _worker_subject = subject
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _in_worker(
    function: Callable[[Any, _Item, _Known], _Result], item: _Item, known: _Known
) -> _Result:
    return function(_worker_subject, item, known)


def _sized(known: tuple[Subject, Traces], structure: Structure, _: None) -> SizedTimeline | None:
    subject, traces = known
    return traces.sized(subject, structure)


def _predicted(
    known: tuple[Subject, Traces], configuration: Configuration, how: tuple[Gpu, dict[str, Any]]
) -> Prediction:
    (subject, traces), (gpu, rest) = known, how
    return predict(subject, configuration, gpu, traces=traces, **rest)


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
