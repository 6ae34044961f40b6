"""Predicts the cases of the benchmark, each distinct configuration traced once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.accuracy.harnesses import Case
from tuner.gpus import get_gpu
from tuner.records import Configuration

GPUS = Path(__file__).parent / "gpus.yaml"


@dataclass(frozen=True, slots=True)
class Predicted:
    """What is predicted for a case, in bytes and seconds; see `Measured`."""

    allocated: float
    reserved: float
    device: float
    loaded: float
    forward: float
    step_s: float
    peak_phase: str
    fits: bool = True
    """Whether the replay on the GPU's memory came to its end."""


@dataclass(frozen=True, slots=True)
class _Task:
    model: str
    configuration: Configuration
    gpu: str
    with_optimizer: bool
    keeps_cache: bool
    chunked_loss: bool


def predict_all(cases: Sequence[Case], *, processes: int = 2) -> Iterator[tuple[int, Predicted]]:
    """(index of the case, prediction), in the order of the cases."""
    tasks = [_task(case) for case in cases]
    distinct = list(dict.fromkeys(tasks))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        results = dict(zip(distinct, pool.map(_predict, distinct, chunksize=1), strict=True))
    for index, task in enumerate(tasks):
        yield index, results[task]


def _task(case: Case) -> _Task:
    return _Task(
        model=case.model,
        configuration=case.configuration,
        gpu=case.gpu,
        with_optimizer=case.with_optimizer,
        keeps_cache=case.keeps_cache,
        chunked_loss=case.chunked_loss,
    )


def _predict(task: _Task) -> Predicted:
    # torch and transformers are loaded in the worker processes only.
    from benchmarks.accuracy import attention, losses
    from benchmarks.accuracy.caching import CachingWorkload
    from benchmarks.accuracy.chunked_loss import ChunkedLossWorkload
    from tuner.estimators.predict import resolve_subject
    from tuner.estimators.replay.allocator import replay
    from tuner.estimators.replay.memory import peak_memory
    from tuner.estimators.tracing.trace import trace

    attention.register()
    losses.register()
    gpu = get_gpu(task.gpu, extra=GPUS)
    subject = resolve_subject("causal_lm", task.model)
    workload: Any = subject.workload
    if task.keeps_cache:
        workload = CachingWorkload(workload)
    if task.chunked_loss:
        workload = ChunkedLossWorkload(workload)
    traced = trace(
        workload,
        subject.model_config,
        task.configuration,
        compute_capability=gpu.compute_capability,
    )
    timeline = traced.timeline
    memory = peak_memory(timeline, context_bytes=gpu.context_bytes)
    sizes = [0 if block.paged else block.size_bytes for block in timeline.blocks]
    # A process that comes to the end of the GPU's memory gives cached segments back.
    limited = replay(timeline.events, sizes, limit_bytes=gpu.memory_bytes - gpu.context_bytes)
    fits = limited.out_of_memory_at is None
    replayed = limited if fits else replay(timeline.events, sizes)
    return Predicted(
        allocated=memory.peak_allocated_bytes,
        reserved=replayed.peak_reserved_bytes,
        device=replayed.peak_reserved_bytes + gpu.context_bytes,
        loaded=memory.loaded_bytes,
        forward=memory.phase_peak_bytes["forward"],
        step_s=_step_s(traced, task, gpu),
        peak_phase=memory.peak_phase,
        fits=fits,
    )


def _step_s(traced: Any, task: _Task, gpu: Any) -> float:
    import numpy as np

    from tuner.estimators.predict import step_work
    from tuner.estimators.speed.roofline import step_times

    times = step_times(
        step_work(traced),
        gpu,
        grad_accum=np.array([int(str(task.configuration["grad_accum"]))]),
        allow_tf32=task.configuration["precision"] == "tf32",
    )
    step_s = float(times.step_s[0])
    return step_s if task.with_optimizer else step_s - float(times.breakdown_s["optimizer"][0])
