"""The traces of the benchmark's cases, kept on disk: what a case needs of its trace, in arrays.

Tracing takes minutes. An entry depends on the task, the libraries and the code that traces, but not
on the rates of kernels (`tuner.cost.speed`), which are judged again without tracing. Their choice
of attention on Hopper changes no entry either: no row is of such a GPU.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tuner.core.files import user_cache
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration
from tuner.cost.speed.roofline import StepWork
from tuner.cost.work_arrays import WorkArrays
from tuner.predict import cache
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import resolve_config

HERE = Path(__file__).parent
GPUS = HERE / "gpus.yaml"

MODELS = HERE / "models.yaml"

_OWN_CODE = ("models.yaml", "traces.py")


@dataclass(frozen=True, slots=True)
class Task:
    """What a case asks of a trace; cases with equal tasks share one."""

    model: str
    configuration: Configuration
    gpu: str
    with_optimizer: bool
    timed_only: bool = False
    """No memory was measured: two traces of small batches tell the work of this one."""

    def the_gpu(self) -> Gpu:
        """The GPU type, of the catalogue or of the measured rows."""
        return get_gpu(self.gpu, extra=GPUS)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Predicted memory of a case in bytes, and whether the GPU's memory is enough."""

    allocated: float
    reserved: float
    device: float
    loaded: float
    forward: float
    resident: float
    peak_phase: str
    fits: bool


SMALL_BATCHES = 6, 7
"""Batches that are traced where only the time of others is asked for."""


def traced(task: Task) -> tuple[Sizes, StepWork]:
    """Memory and work of a task; traced only if the cache has no entry for it.

    Where only time was measured, the work follows from two small batches: it is a polynomial of
    the first degree in the batch. So is the allocated peak; what is reserved is not known then.
    """
    if not task.timed_only:
        return _whole(task)
    batch = int(str(task.configuration["micro_batch"]))
    parts = [_whole(_small(task, each)) for each in SMALL_BATCHES]
    works = [work.passes for _, work in parts]
    same = len(works[0].names) == len(works[1].names) and bool(
        (works[0].names == works[1].names).all()
    )
    if not same or not np.array_equal(parts[0][1].executions, parts[1][1].executions):
        return _whole(replace(task, timed_only=False))
    first, step = batch - SMALL_BATCHES[0], SMALL_BATCHES[1] - SMALL_BATCHES[0]

    def at(low: Any, high: Any) -> Any:
        return low + (high - low) * first / step

    passes = replace(
        works[0],
        **{
            name: at(getattr(works[0], name), getattr(works[1], name))
            for name in ("flops", "bytes_moved", "shapes")
        },
    )
    gpu = task.the_gpu()
    allocated = at(parts[0][0].allocated, parts[1][0].allocated)
    sizes = replace(
        parts[0][0],
        allocated=allocated,
        reserved=np.nan,
        device=np.nan,
        fits=allocated + gpu.context_bytes <= gpu.memory_bytes,
    )
    return sizes, replace(parts[0][1], passes=passes, optimizer=passes)


def _small(task: Task, batch: int) -> Task:
    """The task at this batch, the same for every GPU: eager attention has one kernel on all."""
    precision = str(task.configuration["precision"]).replace("tf32", "fp32")
    configuration = {**task.configuration, "micro_batch": batch, "precision": precision}
    return replace(
        task, gpu="a100_80gb", configuration=Configuration(configuration), timed_only=False
    )


def _whole(task: Task) -> tuple[Sizes, StepWork]:
    gpu = task.the_gpu()
    own = [hashlib.sha256((HERE / name).read_bytes()).hexdigest() for name in _OWN_CODE]
    code = cache.environment_digest(without="speed")
    parts = (code, *own, task, gpu.memory_bytes, gpu.context_bytes, gpu.compute_capability)
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    arrays = cache.read_arrays(name)
    if arrays is not None:
        return _of_arrays(arrays)
    sizes, work = _trace(task, gpu)
    cache.write_arrays(
        name,
        {
            **{field.name: getattr(work.passes, field.name) for field in fields(WorkArrays)},
            "executions": work.executions,
            "optimizer_executions": work.optimizer_executions,
            "host": np.array([work.trained, work.reads_loss]),
            "sizes": np.array([str(getattr(sizes, field.name)) for field in fields(Sizes)]),
        },
    )
    return sizes, work


def _of_arrays(arrays: Mapping[str, Any]) -> tuple[Sizes, StepWork]:
    works = WorkArrays(**{field.name: arrays[field.name] for field in fields(WorkArrays)})
    *numbers, phase, fits = arrays["sizes"].tolist()
    return (
        Sizes(*map(float, numbers), peak_phase=phase, fits=fits == "True"),
        StepWork(
            works,
            arrays["executions"],
            works,
            arrays["optimizer_executions"],
            *arrays["host"].tolist(),
        ),
    )


def _trace(task: Task, gpu: Gpu) -> tuple[Sizes, StepWork]:
    # torch and transformers are loaded only where something has to be traced.
    from tuner.cost.allocator import replay
    from tuner.cost.memory import memory_history, peak_memory
    from tuner.cost.traced import Training
    from tuner.predict.predict import step_work
    from tuner.predict.tracing.trace import trace
    from tuner.predict.training import get_workload

    found = trace(
        get_workload("causal_lm"),
        resolve_config(task.model),
        task.configuration,
        compute_capability=gpu.compute_capability,
    )
    training = Training.of(found)
    course = training.course
    memory = peak_memory(course, context_bytes=gpu.context_bytes)
    events, blocks = course.events.tolist(), course.sizes_bytes.tolist()
    # A process that comes to the end of the GPU's memory gives cached segments back.
    limited = replay(events, blocks, limit_bytes=gpu.memory_bytes - gpu.context_bytes)
    fits = limited.out_of_memory_at is None
    replayed = limited if fits else replay(events, blocks)
    sizes = Sizes(
        allocated=memory.peak_allocated_bytes,
        reserved=replayed.peak_reserved_bytes,
        device=replayed.peak_reserved_bytes + gpu.context_bytes,
        loaded=memory.loaded_bytes,
        forward=memory.phase_peak_bytes["forward"],
        resident=memory_history(course).allocated_bytes[-1],
        peak_phase=memory.peak_phase,
        fits=fits,
    )
    return sizes, step_work(training, task.configuration, gpu)


def model_of(name: str) -> str:
    """The name of a model, or a folder with the configuration of one that has no public name."""
    own = yaml.safe_load(MODELS.read_text("utf-8")).get(name)
    if own is None:
        return name
    folder = (user_cache() or Path(tempfile.gettempdir())) / "accuracy-models" / _digest(own)
    if not folder.is_dir():
        from transformers import CONFIG_MAPPING

        config = CONFIG_MAPPING[own["model_type"]].from_dict(own)
        config.save_pretrained(folder)
    return str(folder)


def _digest(own: Mapping[str, Any]) -> str:
    return hashlib.sha256(repr(own).encode()).hexdigest()[:12]
