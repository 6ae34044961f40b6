"""Estimates of many configurations of one structure at once, on one GPU.

Times and the bytes of blocks follow from the structure's timeline for all points at once. What the
allocator holds beside takes a replay of each: here it is none (`predictor` adds it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Memory, MemoryCategory, Phase
from tuner.cost import allocator
from tuner.cost.library_memory import cublas_workspace_bytes
from tuner.cost.memory import CATEGORIES
from tuner.cost.sized import OptimizerSteps, SizedTimeline, Span, rows_of
from tuner.cost.speed import roofline
from tuner.cost.speed.rates import as_chosen
from tuner.cost.work_arrays import Floats, WorkArrays
from tuner.predict.predict import attention_of, reads_loss
from tuner.predict.traces import grad_accum_of, point_of

_OPTIONAL = (Phase.EVALUATION, Phase.GENERATE)


class Estimates:
    """Configurations of one structure with the steps of their optimizers, on one GPU."""

    def __init__(
        self,
        sized: SizedTimeline,
        configurations: Sequence[Configuration],
        optimizers: Sequence[OptimizerSteps],
        gpu: Gpu,
    ) -> None:
        self._sized, self._gpu = sized, gpu
        self._configurations, self._optimizers = configurations, optimizers
        listed = np.array([point_of(c) for c in configurations], dtype=float)
        self._points, places = np.unique(listed, axis=0, return_inverse=True)
        self._places: NDArray[np.int64] = places.reshape(-1)
        self._params: list[tuple[int, int]] = [*map(sized.params, self._points)]
        self._accumulation = np.array([grad_accum_of(c) for c in configurations])
        self._live: dict[bool, _Live] = {}
        self._updates = {one: _Update(one) for one in dict.fromkeys(optimizers)}

    def params(self, index: int) -> tuple[int, int]:
        """Trainable and total parameters of a configuration."""
        return self._params[int(self._places[index])]

    def memory(self) -> list[Memory]:
        """Peak memory of each configuration on one GPU, as its blocks take it."""
        return [*map(self._memory, range(len(self._places)))]

    def gradient_bytes(self) -> list[list[int]]:
        """Sizes of each one's gradients in the optimizer's order."""
        return [*map(self._gradient_bytes, range(len(self._places)))]

    def times(self, kernel_times: roofline.KernelTimes | None) -> roofline.StepTimes:
        """Step times of each configuration on one GPU."""
        settings, times = self._configurations[0], kernel_times or roofline.Roofline()
        tf32 = settings.get("precision") == "tf32"
        works = WorkArrays.of_operators(self._sized.operators, self._points)
        works = as_chosen(works, self._gpu, attention_of(settings))
        kernels = roofline.KernelSeconds.of(works, self._gpu, times, allow_tf32=tf32)
        passes, trained = (
            roofline.pass_times(kernels, self._sized.executions),
            len(self._sized.order),
        )
        known = {
            one: roofline.optimizer_time(one.works, one.times, trained, self._gpu, times, tf32)
            for one in self._updates
        }
        each = [known[one] for one in self._optimizers]
        update = roofline.UpdateTime(*(np.concatenate(parts) for parts in zip(*each, strict=True)))
        return roofline.whole_step(
            passes, update, self._accumulation, reads_loss=reads_loss(settings), places=self._places
        )

    def _gradient_bytes(self, index: int) -> list[int]:
        """In the optimizer's order. All parameters that no pass reaches are the last size."""
        place = int(self._places[index])
        itemsizes = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
        trained = self._sized.parameters(self._points[place])
        sizes = [numel * itemsizes[kind.split()[0]] for numel, kind in trained]
        idle = self._params[place][0] - sum(numel for numel, _ in trained)
        return [*sizes, idle * itemsizes[trained[-1][1].split()[0]]] if idle else sizes

    def _memory(self, index: int) -> Memory:
        accumulates, point = bool(self._accumulation[index] > 1), int(self._places[index])
        if accumulates not in self._live:
            workspace = cublas_workspace_bytes(self._gpu.compute_capability)
            self._live[accumulates] = _Live.of(
                self._sized, self._points, workspace, accumulates=accumulates
            )
        live, update = self._live[accumulates], self._updates[self._optimizers[index]]
        phases: dict[Phase, _Moment] = {}
        for phase, moment in _moments(live, update, point):
            if phase not in phases or moment.total_bytes > phases[phase].total_bytes:
                phases[phase] = moment
        phase = max(phases, key=lambda one: phases[one].total_bytes)
        highest = phases[phase]
        bytes_of = live.by_category(highest.event, point) + update.by_category(highest.update)
        breakdown = dict(zip(map(str, CATEGORIES), bytes_of.tolist(), strict=True))
        total = highest.total_bytes
        breakdown[str(MemoryCategory.ALLOCATOR_OVERHEAD)] = total - sum(breakdown.values())
        breakdown[str(MemoryCategory.CONTEXT_AND_WORKSPACE)] += self._gpu.context_bytes
        peaks = {str(one): 0 for one in Phase if one not in _OPTIONAL}
        return Memory(
            peak_allocated_bytes=total,
            peak_reserved_bytes=total,
            device_bytes=total + self._gpu.context_bytes,
            loaded_bytes=int(live.loaded[point]),
            phase_peak_bytes=peaks | {str(p): m.total_bytes for p, m in phases.items()},
            peak_phase=str(phase),
            breakdown=breakdown,
            paged_bytes=update.paged_bytes,
        )


def with_overhead(memory: Memory, more_bytes: int, free_bytes: int) -> Memory:
    """An estimate with what a replay adds: rests inside of blocks, and what is free beside them."""
    overhead = str(MemoryCategory.ALLOCATOR_OVERHEAD)
    added = more_bytes + free_bytes
    peaks = {name: size and size + more_bytes for name, size in memory.phase_peak_bytes.items()}
    return replace(
        memory,
        peak_allocated_bytes=memory.peak_allocated_bytes + more_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes + added,
        device_bytes=memory.device_bytes + added,
        phase_peak_bytes=peaks,
        breakdown={**memory.breakdown, overhead: memory.breakdown[overhead] + added},
    )


class _Moment(NamedTuple):
    """Bytes allocated after an event of the passes, and one of the optimizer: -1 before the first.

    `total_bytes` is all of it.
    """

    total_bytes: int
    event: int
    update: int


def _moments(live: _Live, update: _Update, point: int) -> Iterator[tuple[Phase, _Moment]]:
    """The most that each phase has at a point."""
    for number, span in enumerate(live.spans):
        peak, event = int(live.peaks[number, point]), int(live.events[number, point])
        if span.phase is Phase.LOAD:
            yield span.phase, _Moment(peak, event, -1)
            continue
        if span.phase is Phase.OPTIMIZER:
            before = int(live.before[number, point])
            highest = update.highest[span.step]
            total = before + int(update.live[highest])
            yield span.phase, _Moment(total, live.starts[number] - 1, highest)
        last = update.last(span)
        yield span.phase, _Moment(peak + (int(update.live[last]) if last >= 0 else 0), event, last)


def _bytes(sizes: Floats | NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Bytes of blocks as the allocator rounds them, and as they count without a replay.

    A large block gets a segment of its own, and a rest of up to 1 MiB in it is not split off:
    `max_memory_allocated` counts it. Blocks that share a segment count as rounded.
    """
    rounded = np.ceil(sizes / allocator.MIN_BLOCK_BYTES - 1e-9) * allocator.MIN_BLOCK_BYTES
    segments = np.ceil(rounded / allocator.ROUND_LARGE_BYTES) * allocator.ROUND_LARGE_BYTES
    whole = (rounded >= allocator.LARGE_OWN_SEGMENT_BYTES) & (
        segments - rounded <= allocator.SMALL_LIMIT_BYTES
    )
    return rounded, np.where(whole, segments, rounded)


@dataclass(frozen=True, slots=True, eq=False)
class _Live:
    """Bytes in the blocks of a timeline at P points and in S spans, those of the optimizer aside.

    `peaks` (S, P) are the most bytes in each span, `events` (S, P) after which event; `before`
    (S, P) when it begins, and `loaded` (P,) when the first pass does.
    """

    spans: tuple[Span, ...]
    starts: tuple[int, ...]
    peaks: NDArray[np.int64]
    events: NDArray[np.int64]
    before: NDArray[np.int64]
    loaded: NDArray[np.int64]
    rounded: Floats
    numbers: NDArray[np.int64]
    rows: NDArray[np.int64]
    births: NDArray[np.int64]
    deaths: NDArray[np.int64]
    counted: dict[int, Any]

    @classmethod
    def of(
        cls, sized: SizedTimeline, points: Floats, workspace_bytes: int, *, accumulates: bool
    ) -> _Live:
        """At points (P, 4)."""
        spans = tuple(sized.spans(accumulates=accumulates))
        pieces = [sized.events[span.start : span.end] for span in spans]
        block, sign = np.concatenate(pieces).T
        position = np.arange(len(block))
        births = np.full(len(sized.blocks.numbers), -1)
        births[block[sign > 0]] = position[sign > 0]
        deaths = np.full(len(births), len(block))
        deaths[block[sign < 0]] = position[sign < 0]
        sign = np.where(births[block] < 0, 0, sign)  # a free of what was never allocated
        numbers, rows = sized.blocks.numbers.astype(np.int64), rows_of(sized.blocks.labels)
        sign = np.where(rows[block] < 0, 0, sign)
        sizes = sized.sizes.at(points).round()
        if sized.workspace >= 0:
            sizes[sized.workspace] = workspace_bytes
        rounded, settled = _bytes(sizes)
        settled = settled.astype(np.int64)  # whole numbers are added up several times faster
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        starts = [0, *ends[:-1]]
        peaks, events, before = np.zeros((3, len(spans), len(points)), dtype=np.int64)
        changes = np.concatenate([settled, -settled, np.zeros_like(settled[:1])])
        change = np.where(sign == 0, -1, numbers[block] + np.where(sign > 0, 0, len(settled)))
        # One point at a time: its few hundred thousand events stay in the processor's cache.
        for point in range(len(points)):
            live = np.cumsum(changes[:, point].take(change))
            for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
                if not end:
                    continue
                first = max(start - 1, 0)
                highest = first + int(live[first:end].argmax())
                peaks[number, point], events[number, point] = live[highest], highest
                before[number, point] = live[start - 1] if start else 0
        forward = next(n for n, span in enumerate(spans) if span.phase is Phase.FORWARD)
        found = spans, (*starts,), peaks, events, before, before[forward]
        return cls(*found, rounded, numbers, rows, births, deaths, {})

    def by_category(self, event: int, point: int) -> NDArray[np.int64]:
        """Bytes after an event at a point, as rounded."""
        if event not in self.counted:
            alive = (self.births >= 0) & (self.births <= event) & (self.deaths > event)
            alive &= self.rows >= 0
            width = len(self.rounded)
            places = self.rows[alive] * width + self.numbers[alive]
            counts = np.bincount(places, minlength=len(CATEGORIES) * width)
            self.counted[event] = counts.reshape(len(CATEGORIES), width)
        found: NDArray[np.int64] = (self.counted[event] @ self.rounded[:, point]).astype(np.int64)
        return found


class _Update:
    """Bytes that an optimizer has allocated after each of its events, and their purpose."""

    def __init__(self, steps: OptimizerSteps) -> None:
        self._steps = steps
        self._rounded, settled = _bytes(steps.sizes_bytes)
        self._rows = rows_of(steps.blocks.labels)
        self._known: dict[int, NDArray[np.int64]] = {}
        paged = self._rows < 0
        self.paged_bytes = int(steps.sizes_bytes[paged].sum())
        block, sign = steps.events.T
        self.live = np.cumsum(np.where(paged, 0, settled)[block] * sign).astype(np.int64)
        ends = ((steps.first, steps.second), (steps.second, len(self.live)))
        self.highest = [
            max(start - 1, 0) + int(np.argmax(self.live[max(start - 1, 0) : end])) if end else -1
            for start, end in ends
        ]

    def last(self, span: Span) -> int:
        """The last of its events before a span's own; -1 before the first."""
        if span.phase is Phase.OPTIMIZER or span.step:
            done = span.step > 1 or (span.step == 1 and span.phase is Phase.OPTIMIZER)
            return (len(self.live) if done else self._steps.second) - 1
        return self._steps.first - 1

    def by_category(self, event: int) -> NDArray[np.int64]:
        """Bytes after an event, as rounded."""
        if event not in self._known:
            block, sign = self._steps.events[: event + 1].T
            alive = np.zeros(len(self._rows), dtype=np.int64)
            np.add.at(alive, block, sign)
            chosen = (alive > 0) & (self._rows >= 0)
            self._known[event] = np.bincount(
                self._rows[chosen], weights=self._rounded[chosen], minlength=len(CATEGORIES)
            ).astype(np.int64)
        return self._known[event]
