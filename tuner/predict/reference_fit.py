"""What small trainings on a processor say of it beyond its kernels alone.

Two pairs of numbers, each by least squares over the trainings, relative to what was measured:

    step      = launch_s * operators + step_factor * kernels
    resident  = context_bytes        + live_factor * live tensors

And of those that give back what they free, by precision, the mean of what is resident beside live
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from tuner.core.gpu import Gpu
from tuner.cost.compiled import Floats
from tuner.cost.operators.workspace import PROCESSOR
from tuner.cost.replay.memory import peak_memory
from tuner.cost.speed.kernel_times import ProcessorKernelTimes
from tuner.cost.speed.processor import processor
from tuner.cost.speed.profile import DeviceProfile
from tuner.cost.speed.roofline import StepWork, step_times
from tuner.predict.predict import step_work
from tuner.predict.reference import WORKLOAD, ReferenceRun, model_config
from tuner.predict.tracing.trace import trace
from tuner.predict.training import get_workload

_LEAST_FACTOR = 0.1


def calibrated_on_reference(profile: DeviceProfile, runs: Sequence[ReferenceRun]) -> DeviceProfile:
    """The profile with what the trainings `runs` add to it."""
    config, workload, gpu = model_config(), get_workload(WORKLOAD), processor(profile)
    without_launches = replace(profile, launch_s=0.0)
    plain = [run for run in runs if not run.gives_back]
    launch, kernels, live = [], [], []
    beside: dict[str, list[int]] = {}
    for run in runs:
        traced = trace(workload, config, run.configuration, compute_capability=PROCESSOR)
        live_bytes = peak_memory(
            traced.timeline, context_bytes=0, caching=False
        ).peak_allocated_bytes
        if run.gives_back:
            beside.setdefault(run.precision, []).append(run.resident_bytes - live_bytes)
            continue
        work = step_work(traced)
        whole_s, kernels_s = (_step_s(work, gpu, alone) for alone in (profile, without_launches))
        launch.append(whole_s - kernels_s)
        kernels.append(kernels_s)
        live.append(live_bytes)
    ones = [1.0] * len(plain)
    launch_factor, step_factor = two_parts(launch, kernels, [run.step_s for run in plain])
    context, live_factor = two_parts(ones, live, [run.resident_bytes for run in plain])
    return replace(
        profile,
        # None of them can be nothing.
        launch_s=profile.launch_s * max(launch_factor, _LEAST_FACTOR),
        step_factor=max(step_factor, _LEAST_FACTOR),
        context_bytes=round(context),
        live_factor=max(live_factor, 1.0),
        pages_bytes={name: max(0, round(fmean(sizes))) for name, sizes in beside.items()} or None,
        step_spread=max(run.spread for run in plain),
    )


def _step_s(work: StepWork, gpu: Gpu, profile: DeviceProfile) -> float:
    times = ProcessorKernelTimes(profile)
    return float(step_times(work, gpu, grad_accum=np.array([1]), kernel_times=times).step_s[0])


def two_parts(
    first: Sequence[float], second: Sequence[float], total: Sequence[float]
) -> tuple[float, float]:
    """Factors of two parts that make up totals, none below 0; relative errors weigh alike.

    Where the best factor of one part is negative it is 0, and the other stands alone.
    """
    parts = np.array([first, second], dtype=float) / np.array(total, dtype=float)
    both, *_ = np.linalg.lstsq(parts.T, np.ones(len(total)), rcond=None)
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = [_alone(part) for part in parts]
    errors = [
        float(((factor * part - 1) ** 2).sum()) for factor, part in zip(alone, parts, strict=True)
    ]
    return (alone[0], 0.0) if errors[0] < errors[1] else (0.0, alone[1])


def _alone(part: Floats) -> float:
    return float(part.sum() / (part @ part))
