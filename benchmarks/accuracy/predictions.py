"""Predicts the cases of the benchmark, each distinct configuration traced once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np

from benchmarks.accuracy.harnesses import Case
from benchmarks.accuracy.traces import GPUS, Task, model_of, traced
from tuner.app.estimate import asked
from tuner.core.expressions import show
from tuner.core.meanwhile import environment
from tuner.cost.speed.roofline import (
    MEASURED_MASK,
    Efficiency,
    Roofline,
    StepTimes,
    StepWork,
    step_times,
)

__all__ = ["GPUS", "Predicted", "predict_all"]

_GIVES_BACK = {"MALLOC_TRIM_THRESHOLD_": "65536"}
"""With glibc's own thresholds a process keeps 770 MB of each trace of BERT-large: 13 GB in all."""

UNSEEN_KERNEL = 2.0
"""How many times as long a kernel may take that runs in a way that no source measured: by so much
the published rates of the memory-efficient kernel differ, forward and backward (184 and 94
TFLOP/s with heads of 128; `attention_rates` names the source)."""


Ends = tuple[float, float]
"""Lower and upper end, as factors."""

HELD_OUT = Efficiency(
    masked_attention=1.0, takes={**Efficiency().takes, MEASURED_MASK: (1.0, UNSEEN_KERNEL)}
)
"""Without what runs of a program with padded batches taught of attention with a dense mask."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What is predicted for a case, in bytes and seconds; see `Measured`."""

    allocated: float
    reserved: float
    device: float
    loaded: float
    forward: float
    resident: float
    step_s: float
    peak_phase: str
    held_out_step_s: float = 0.0
    """The step without what was learned of kernels from rows of the same program."""
    unknown: Ends = (1.0, 1.0)
    """What host, kernels and board may make of the step, over `step_s`; see `StepTimes.unknown`."""
    held_out_unknown: Ends = (1.0, 1.0)
    """The same of `held_out_step_s`."""
    fits: bool = True
    """Whether the replay on the GPU's memory came to its end."""


def predict_all(cases: Sequence[Case], *, processes: int = 2) -> Iterator[tuple[int, Predicted]]:
    """(index of the case, prediction), in the order of the cases."""
    tasks = [_task(case) for case in cases]  # as `tuner estimate --loop own --set` reads each
    distinct = list(dict.fromkeys(tasks))
    with (
        environment(_GIVES_BACK),
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        results = dict(zip(distinct, pool.map(_predict, distinct, chunksize=1), strict=True))
    for index, task in enumerate(tasks):
        yield index, results[task]


def _task(case: Case) -> Task:
    model = model_of(case.model)
    said = {name: show(value) for name, value in case.configuration.items()}
    return Task(
        model=model,
        configuration=asked(None, model, said, loop="own").configuration,
        gpu=case.gpu,
        with_optimizer=case.with_optimizer,
        timed_only=_is_timed(case),
    )


def _is_timed(case: Case) -> bool:
    """True where the memory of a program of many batches is not compared."""
    ways = case.configuration.get("program_ways", ())
    return "question_answering" in ways and case.measured.device is None


def _predict(task: Task) -> Predicted:
    sizes, work = traced(task)
    times, held_out = (_times(task, work, e) for e in (Efficiency(), HELD_OUT))
    return Predicted(
        allocated=sizes.allocated,
        reserved=sizes.reserved,
        device=sizes.device,
        loaded=sizes.loaded,
        forward=sizes.forward,
        resident=sizes.resident,
        step_s=_step_s(task, times),
        peak_phase=sizes.peak_phase,
        held_out_step_s=_step_s(task, held_out),
        unknown=times.unknown(0),
        held_out_unknown=held_out.unknown(0),
        fits=sizes.fits,
    )


def _times(task: Task, work: StepWork, efficiency: Efficiency) -> StepTimes:
    return step_times(
        work,
        task.the_gpu(),
        grad_accum=np.array([int(str(task.configuration["grad_accum"]))]),
        allow_tf32=task.configuration["precision"] == "tf32",
        kernel_times=Roofline(efficiency),
    )


def _step_s(task: Task, times: StepTimes) -> float:
    step_s = float(times.step_s[0])
    return step_s if task.with_optimizer else step_s - float(times.breakdown_s["optimizer"][0])
