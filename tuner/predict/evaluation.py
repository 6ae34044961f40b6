"""Evaluates one compiled structure at the points of many configurations, on one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Memory, MemoryCategory, Phase
from tuner.cost.compiled import (
    CATEGORIES,
    LOADING,
    SEGMENTS,
    CompiledPasses,
    Replayed,
    Replays,
)
from tuner.cost.library_memory import cublas_workspace_bytes
from tuner.cost.speed.rates import as_chosen
from tuner.cost.speed.roofline import (
    KernelSeconds,
    KernelTimes,
    Roofline,
    StepTimes,
    optimizer_time,
    pass_times,
    whole_step,
)
from tuner.cost.work_arrays import WorkArrays
from tuner.predict.compiler.optimizer_step import CompiledOptimizer, work_arrays
from tuner.predict.compiler.structure import Point, Structure, anchors, interpolate
from tuner.predict.predict import attention_of, grad_accum_of, point_of


class Evaluation:
    """One structure at the points of many configurations, on one GPU."""

    def __init__(
        self,
        passes: CompiledPasses,
        structure: Structure,
        configurations: Sequence[Configuration],
        gpu: Gpu,
        replayed: Mapping[Point, Replays],
    ) -> None:
        self._passes, self._gpu = passes, gpu
        points = np.array([point_of(c) for c in configurations], dtype=float)
        self._accumulation = np.array([grad_accum_of(c) for c in configurations])
        self._allow_tf32 = structure.settings.get("precision") == "tf32"
        unique, self._place = np.unique(points, axis=0, return_inverse=True)
        workspace = cublas_workspace_bytes(gpu.compute_capability)
        self._block_bytes = passes.rounded_bytes(unique, workspace)
        self._live = passes.live_bytes(self._block_bytes)
        self._ends = passes.end_bytes(self._block_bytes)
        self._loaded = self._ends[0].round().astype(int).tolist()
        added = interpolate(unique, anchors(unique, passes), replayed)
        self._added = added.round().astype(int).tolist()
        self._known_peaks: dict[bool, _Peaks] = {}
        self._params = passes.trainable_params(unique), passes.frozen.total(unique)
        works = WorkArrays.of_operators(passes.operators, unique)
        self._works = as_chosen(works, gpu, attention_of(structure.settings))

    def params(self, index: int) -> tuple[int, int]:
        """Trainable and total parameters of a configuration."""
        trainable, frozen = (round(float(n[self._place[index]])) for n in self._params)
        return trainable, trainable + frozen

    def times(
        self, optimizers: Sequence[CompiledOptimizer], kernel_times: KernelTimes | None
    ) -> StepTimes:
        """Step times of all configurations, given the optimizer step of each."""
        times = kernel_times or Roofline()
        kernels = KernelSeconds.of(self._works, self._gpu, times, allow_tf32=self._allow_tf32)
        passes = pass_times(kernels, self._passes.executions, times)
        optimizer_s = {}
        for optimizer in dict.fromkeys(optimizers):
            arrays, executions = work_arrays(optimizer)
            update_s = optimizer_time(arrays, executions, self._gpu, times, self._allow_tf32)
            optimizer_s[optimizer] = float(update_s[0])
        each = np.array([optimizer_s[optimizer] for optimizer in optimizers])
        return whole_step(passes, each, self._accumulation, places=self._place)

    def memory(self, index: int, optimizer: CompiledOptimizer) -> Memory:
        """Peak memory of one configuration, with its breakdown."""
        place = int(self._place[index])
        accumulates = bool(self._accumulation[index] > 1)
        peaks, added = self._peaks(accumulates), Replayed(*self._added[place][accumulates])
        passes = {
            phase: peaks.by_phase[phase][place] + optimizer.state_bytes
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        }
        phases = {
            Phase.LOAD: peaks.by_phase[Phase.LOAD][place] + added.load_bytes,
            Phase.FORWARD: passes[Phase.FORWARD] + added.forward_bytes,
            Phase.BACKWARD: passes[Phase.BACKWARD] + added.backward_bytes,
            Phase.OPTIMIZER: peaks.end[place] + optimizer.peak_bytes + added.end_bytes,
        }
        peak_phase = max(phases, key=phases.__getitem__)
        breakdown = dict(zip(CATEGORIES, peaks.breakdown[peak_phase][place], strict=True))
        if peak_phase is not Phase.LOAD:
            breakdown[MemoryCategory.OPTIMIZER_STATE] += optimizer.state_bytes
        if peak_phase is Phase.OPTIMIZER:
            breakdown[MemoryCategory.TEMPORARY] += optimizer.peak_bytes - optimizer.state_bytes
        return self._memory(place, added, breakdown, phases, peak_phase, optimizer)

    def forward_memory(
        self, index: int, optimizer: CompiledOptimizer, layers: int | None
    ) -> Memory:
        """Peak memory of an evaluation: a forward pass of checkpointed layers that keeps nothing.

        Of the activations at the peak those of two of the `layers` stay: a layer's input and
        output. An upper bound where their number is unknown.
        """
        place = int(self._place[index])
        added = Replayed(*self._added[place][False])
        breakdown = dict(
            zip(CATEGORIES, self._peaks(False).breakdown[Phase.FORWARD][place], strict=True)
        )
        if layers is not None:
            breakdown[MemoryCategory.ACTIVATIONS] *= min(2, layers)
            breakdown[MemoryCategory.ACTIVATIONS] //= layers
        breakdown[MemoryCategory.OPTIMIZER_STATE] += optimizer.state_bytes
        allocated = sum(breakdown.values()) + added.forward_bytes
        phases = {Phase.EVALUATION: allocated}
        return self._memory(place, added, breakdown, phases, Phase.EVALUATION, optimizer)

    def _memory(
        self,
        place: int,
        added: Replayed,
        breakdown: dict[MemoryCategory, int],
        phases: Mapping[Phase, int],
        peak_phase: Phase,
        optimizer: CompiledOptimizer,
    ) -> Memory:
        reserved = phases[peak_phase] + added.free_bytes
        breakdown[MemoryCategory.ALLOCATOR_OVERHEAD] = reserved - sum(breakdown.values())
        breakdown[MemoryCategory.CONTEXT_AND_WORKSPACE] += self._gpu.context_bytes
        return Memory(
            peak_allocated_bytes=phases[peak_phase],
            peak_reserved_bytes=reserved,
            device_bytes=reserved + self._gpu.context_bytes,
            loaded_bytes=self._loaded[place] + added.load_bytes,
            phase_peak_bytes={str(phase): peak for phase, peak in phases.items()},
            peak_phase=str(peak_phase),
            breakdown={str(category): breakdown.get(category, 0) for category in MemoryCategory},
            paged_bytes=optimizer.paged_bytes,
        )

    def _peaks(self, accumulates: bool) -> _Peaks:
        """The peaks at every point, with one micro-step or with more."""
        if accumulates not in self._known_peaks:
            self._known_peaks[accumulates] = self._find_peaks(accumulates)
        return self._known_peaks[accumulates]

    def _find_peaks(self, accumulates: bool) -> _Peaks:
        passes = self._passes
        by_phase, breakdown = {}, {}
        for phase, rows in self._rows(accumulates).items():
            winners = rows[self._live[rows].argmax(axis=0)]
            by_phase[phase] = self._live[rows].max(axis=0).round().astype(int).tolist()
            sizes = np.einsum("pcu,up->pc", passes.counts[winners], self._block_bytes)
            breakdown[phase] = _whole(sizes)
        end = 2 if accumulates else 1
        sizes = np.einsum("cu,up->pc", passes.ends[end], self._block_bytes)
        breakdown[Phase.OPTIMIZER] = _whole(sizes)
        return _Peaks(by_phase, breakdown, end=self._ends[end].round().astype(int).tolist())

    def _rows(self, accumulates: bool) -> dict[Phase, NDArray[np.int64]]:
        """The moments of each phase but the optimizer's, with one micro-step or with more."""
        numbers = [n for n, s in enumerate(SEGMENTS) if accumulates or s.micro_step == 0]
        chosen = {
            phase: [n for n in numbers if SEGMENTS[n].phase is phase]
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        }
        return {
            phase: np.nonzero(np.isin(self._passes.segments, segments))[0]
            for phase, segments in {Phase.LOAD: [LOADING], **chosen}.items()
        }


@dataclass(frozen=True, slots=True)
class _Peaks:
    """Allocated bytes at each point, without what the optimizer has.

    `by_phase` is the most in each phase but the optimizer's, `end` what is left when that
    begins; `breakdown` splits each by category.
    """

    by_phase: Mapping[Phase, list[int]]
    breakdown: Mapping[Phase, list[list[int]]]
    end: list[int]


def _whole(values: Any) -> list[list[int]]:
    rows: list[list[int]] = values.round().astype(int).tolist()
    return rows


def gradient_bytes(passes: CompiledPasses, configuration: Configuration) -> list[int]:
    """Sizes of the gradients of a configuration in bytes, one a parameter that is trained.

    Parameters of the same size stand together; those that no pass reaches are in the last one.
    """
    point = np.array([point_of(configuration)], dtype=float)
    numels = passes.trainable.sizes.at(point)[:, 0].round().astype(int).tolist()
    counts = passes.trainable.counts.tolist()
    dtypes = [kind.split()[0] for kind in passes.trainable_kinds]
    itemsizes = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
    sizes = [
        numel * itemsizes[dtype]
        for numel, count, dtype in zip(numels, counts, dtypes, strict=True)
        for _ in range(count)
    ]
    reached = sum(numel * count for numel, count in zip(numels, counts, strict=True))
    idle = round(float(passes.trainable_params(point)[0])) - reached
    return [*sizes, idle * itemsizes[dtypes[-1]]] if idle else sizes
