"""One optimizer step of a trace: memory by what it is for, and the operators that take longest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, MemoryCategory, Phase
from tuner.cost.allocator import AllocatorSettings
from tuner.cost.memory import CATEGORIES, Course, memory_history
from tuner.cost.speed.kernel_times import on_measured_device
from tuner.cost.speed.profile import DeviceProfile
from tuner.cost.speed.roofline import (
    KernelSeconds,
    KernelTimes,
    StepWork,
    optimizer_time,
    pass_times,
    step_times,
)
from tuner.cost.step_details import MemoryTimeline, PhaseSpan, most_expensive
from tuner.cost.traced import Training
from tuner.cost.work_arrays import SEGMENTS
from tuner.predict.predict import require_supported, step_work
from tuner.predict.traces import Subject, Traces, grad_accum_of
from tuner.space.models.catalogue import architecture

MAX_POINTS = 400
"""Moments of a timeline: more than a screen shows, and a page stays small."""


def trace_timeline(
    subject: Subject,
    configuration: Configuration,
    gpu: Gpu,
    *,
    profile: DeviceProfile | None = None,
) -> MemoryTimeline:
    """Trace `configuration` and say what it has allocated over its second optimizer step.

    How long a phase takes is the roofline's answer; inside a phase, allocations and frees
    are spread evenly over its time. Takes as long as a prediction at full depth. Raises
    `InputError` when the GPU cannot run it.
    """
    gpu, kernel_times, _ = on_measured_device(gpu, profile)
    require_supported(configuration, gpu, model=architecture(subject.model))
    traced = Traces().of(subject, configuration, gpu)
    work, allow_tf32 = step_work(traced, configuration, gpu), configuration["precision"] == "tf32"
    seconds = _phase_seconds(traced, work, gpu, kernel_times, allow_tf32)
    settings, _ = AllocatorSettings.of(str(configuration.get("allocator", "")))
    timeline = timeline_of(traced.course, seconds, settings)
    grad_accum = grad_accum_of(configuration)
    whole = step_times(
        work,
        gpu,
        grad_accum=np.array([grad_accum]),
        allow_tf32=allow_tf32,
        kernel_times=kernel_times,
    )
    operators = most_expensive(
        work,
        gpu,
        kernel_times,
        grad_accum=grad_accum,
        step_s=float(whole.step_s[0]),
        allow_tf32=allow_tf32,
    )
    return replace(timeline, operators=operators)


def timeline_of(
    course: Course,
    seconds: Mapping[tuple[Phase, int], float],
    settings: AllocatorSettings | None = None,
) -> MemoryTimeline:
    """The timeline of a training's second step; `seconds` by phase and micro-step."""
    first, spans, bounds = 0, [], []
    now_s = 0.0
    marks = course.marks
    ends = [mark.event for mark in marks[1:]] + [len(course.events)]
    for mark, end in zip(marks, ends, strict=True):
        if mark.step != 1 or mark.phase is Phase.LOAD:
            continue
        first = first or mark.event
        end_s = now_s + seconds[mark.phase, mark.micro_step]
        spans.append(PhaseSpan(str(mark.phase), mark.micro_step, now_s, end_s))
        bounds.append((mark.event, end, now_s, end_s))
        now_s = end_s
    live, reserved = _live_bytes(course, first, settings)
    times_s = np.concatenate(
        [np.linspace(start_s, end_s, max(0, end - start)) for start, end, start_s, end_s in bounds]
    )
    keep = _highest_of_bins(times_s, live.sum(axis=0))
    categories = {
        str(category): tuple(int(size) for size in live[row, keep])
        for row, category in enumerate(CATEGORIES)
        if live[row].any()
    }
    return MemoryTimeline(
        times_s=tuple(float(f"{t:.6g}") for t in times_s[keep]),
        categories=categories,
        reserved_bytes=tuple(int(size) for size in reserved[keep]),
        spans=tuple(spans),
    )


def _live_bytes(
    course: Course, first: int, settings: AllocatorSettings | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Allocated bytes by category (rows) after each event from `first` on, and reserved bytes.

    The rests in blocks that were not worth splitting off are overhead, as in a prediction.
    """
    changes = np.zeros((len(CATEGORIES), len(course.events)), dtype=np.int64)
    changes[course.rows[course.events[:, 0]], np.arange(len(course.events))] = course.added_bytes
    live = np.cumsum(changes, axis=1)
    history = memory_history(course, settings=settings)
    overhead = CATEGORIES.index(MemoryCategory.ALLOCATOR_OVERHEAD)
    live[overhead] += np.array(history.allocated_bytes) - live.sum(axis=0)
    return live[:, first:], np.array(history.reserved_bytes)[first:]


def _highest_of_bins(times_s: NDArray[np.float64], totals: NDArray[np.int64]) -> list[int]:
    """The place of the highest total in each of `MAX_POINTS` equal parts of the time."""
    part = np.minimum(
        (times_s / max(float(times_s[-1]), 1e-12) * MAX_POINTS).astype(int), MAX_POINTS - 1
    )
    keep = []
    for number in np.unique(part):
        places = np.flatnonzero(part == number)
        keep.append(int(places[np.argmax(totals[places])]))
    return keep


def _phase_seconds(
    traced: Training, work: StepWork, gpu: Gpu, times: KernelTimes, allow_tf32: bool
) -> dict[tuple[Phase, int], float]:
    """Seconds of each phase of the traced second step."""
    kernels = KernelSeconds.of(work.passes, gpu, times, allow_tf32=allow_tf32)
    passes = pass_times(kernels, work.executions)
    seconds = {
        (segment.phase, segment.micro_step): float(sum(s[0] for s in by_kind.values()))
        for segment, by_kind in zip(SEGMENTS, passes.seconds, strict=True)
    }
    update = work.optimizer, work.optimizer_executions, work.trained
    optimizer_s = sum(float(part[0]) for part in optimizer_time(*update, gpu, times, allow_tf32))
    for mark in traced.course.marks:
        if mark.phase is Phase.OPTIMIZER:
            seconds[mark.phase, mark.micro_step] = optimizer_s
    return seconds
