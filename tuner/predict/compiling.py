"""Traces of timelines, optimizers and configurations, in several processes at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from tuner.core.errors import UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Prediction
from tuner.cost.sized import OptimizerSteps, SizedTimeline
from tuner.predict.compiler.structure import Structure
from tuner.predict.predict import predict
from tuner.predict.shipped import can_trace
from tuner.predict.traces import Traces


def trace_timelines(
    structures: Iterable[Structure], traces: Traces, *, workers: int
) -> Iterator[Structure]:
    """Have the timelines that `traces` lacks; each structure as it is done."""
    missing = [each for each in structures if traces.lacks(each)]
    if missing and can_trace():
        traces.subject.resolve()
    for structure, sized in in_forks(Traces.sized, missing, traces, workers=workers):
        traces.keep(structure, sized)
        yield structure


def trace_optimizers(
    wanted: Iterable[tuple[SizedTimeline, Configuration]], traces: Traces, *, workers: int
) -> None:
    """Have the steps of optimizers that `traces` lacks: those of configurations with a timeline."""
    entries = {traces.optimizer_entry(sized, each): (sized, each) for sized, each in wanted}
    missing = [(entry, pair) for entry, pair in entries.items() if traces.lacks_steps(*pair)]
    for (entry, _), steps in in_forks(_steps, missing, traces, workers=workers):
        traces.keep_steps(entry, steps)


def trace_all(
    configurations: Sequence[Configuration], gpu: Gpu, traces: Traces, *, workers: int, **how: Any
) -> list[Prediction]:
    """A prediction of each configuration at full depth, in their order; `how` as for `predict`."""
    structures = {traces.structure(each, gpu) for each in configurations}
    wanted = [structure for structure in structures if structure is not None]
    for _ in trace_timelines(wanted, traces, workers=workers):
        pass
    distinct = [*{each.key: each for each in configurations}.values()]
    known = traces, gpu, how
    traced = in_forks(_predicted, distinct, known, workers=workers, traces=None in structures)
    found = {configuration.key: prediction for configuration, prediction in traced}
    return [found[configuration.key] for configuration in configurations]


_AFTER_AUTOGRAD = "autograd's threading in combination with fork"
"""PyTorch's error in a fork of a process that has run a backward pass, in builds for GPUs
(torch/csrc/autograd/engine.cpp): a process that has traced something has to do the rest itself."""

_Subject = TypeVar("_Subject")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_forks(
    function: Callable[[_Subject, _Item], _Result],
    items: Sequence[_Item],
    subject: _Subject,
    *,
    workers: int,
    traces: bool = True,
) -> Iterator[tuple[_Item, _Result]]:
    """Each item with what `function` makes of it, as they are done; here if nothing is gained.

    Raises `UnavailableError` if one of the processes is killed.
    """
    if workers < 2 or len(items) < 2:
        for item in items:
            yield item, function(subject, item)
        return
    if traces:
        # Imported before the fork, so that only this process pays: bitsandbytes and peft as well.
        importlib.import_module("tuner.predict.compiler.deepening")
        importlib.import_module("peft")
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)  # tensors without data need no more, and forks need few
    left = []
    with _workers(min(workers, len(items)), subject) as pool:
        futures = {pool.submit(_in_worker, function, item): item for item in items}
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
                yield futures[future], result
    for item in left:
        yield item, function(subject, item)


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


_worker_subject: Any = None
"""The subject of a compiling process; set once when the process starts."""


def _begin(subject: Any) -> None:
    """Prepare a compiling process. It ignores signals for its parent, which ends it.

    Ctrl-C reaches the whole group, and `ray job stop` and schedulers send SIGTERM to every process
    of a job: the parent would find its pool broken before it could write what there is.
    """
    global _worker_subject  # noqa: PLW0603  (one job per process of the pool)
    _worker_subject = subject
    gc.freeze()  # what its parent has made stays: its collector need not look at it
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _in_worker(function: Callable[[Any, _Item], _Result], item: _Item) -> _Result:
    return function(_worker_subject, item)


def _steps(
    traces: Traces, wanted: tuple[str, tuple[SizedTimeline, Configuration]]
) -> OptimizerSteps:
    _, (sized, configuration) = wanted
    return traces.optimizer(sized, configuration)


def _predicted(
    known: tuple[Traces, Gpu, dict[str, Any]], configuration: Configuration
) -> Prediction:
    traces, gpu, how = known
    return predict(traces.subject, configuration, gpu, traces=traces, **how)
