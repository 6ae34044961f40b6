"""Predictions of a whole search space at once, from compiled timelines.

Configurations fall into a few dozen structures; each structure is compiled once (seconds,
in parallel processes), kept on disk, and evaluated for all its configurations and all GPUs
in milliseconds. A structure that does not compile is predicted by full traces instead, and
its predictions say so.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tuner.estimate import cache
from tuner.estimate.compiled import CATEGORIES, LOADING, SEGMENTS, CompiledPasses, Replayed, Replays
from tuner.estimate.kernel_times import on_measured_device
from tuner.estimate.optimizer_step import CompiledOptimizer, compile_optimizer, work_arrays
from tuner.estimate.overhead import LARGEST_GPU_BYTES, Point, anchors, interpolate, replay_all
from tuner.estimate.predict import (
    Subject,
    build_prediction,
    grad_accum_of,
    method_text,
    predict,
    require_supported,
    resolve_subject,
    speed_of,
)
from tuner.estimate.profile import DeviceProfile
from tuner.estimate.roofline import KernelTimes, Roofline, StepTimes, pass_times, whole_step
from tuner.estimate.structure import Structure
from tuner.estimate.work_arrays import WorkArrays
from tuner.estimate.workspace import CUBLAS_WORKSPACE_BYTES, cublas_workspace_bytes
from tuner.gpus import Gpu
from tuner.models.catalogue import architecture
from tuner.records import Configuration, Memory, MemoryCategory, Phase, Prediction

METHOD = "compiled timeline, checked against a held-back trace"
FALLBACK = "this structure does not compile"

OnProgress = Callable[[int, int], None]
"""Called with structures done and structures in all."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is predicted: a workload and a model, by name; cheap to make and to send."""

    workload: str
    model: str


class Predictor:
    """Predicts configurations of one job. Keeps what it compiled in memory and on disk.

    `workers` processes compile; with fewer than two, this process does. Neither torch nor
    transformers is imported while every structure asked for is in the cache.
    """

    def __init__(self, job: Job, *, workers: int = 0) -> None:
        self._job = job
        self._workers = workers
        self._architecture = architecture(job.model)
        self._subject: Subject | None = None
        self._passes: dict[Structure, CompiledPasses | str] = {}
        self._replayed: dict[Structure, dict[Point, Replays]] = {}
        self._optimizers: dict[str, CompiledOptimizer] = {}

    def predict(
        self,
        configurations: Sequence[Configuration],
        gpu: Gpu,
        *,
        margin_fraction: float | None = None,
        profile: DeviceProfile | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Prediction]:
        """A prediction of each configuration on `gpu`, in their order.

        A device profile replaces the catalogue's rates. Raises `InputError` when the GPU cannot
        run one of them.
        """
        for configuration in configurations:
            require_supported(configuration, gpu)
        groups: dict[Structure, list[int]] = {}
        for index, configuration in enumerate(configurations):
            groups.setdefault(self._structure(configuration, gpu), []).append(index)
        requests = [
            _Request(structure, tuple(sorted({_point(configurations[i]) for i in indices})))
            for structure, indices in groups.items()
        ]
        self._prepare(requests, on_progress)
        results: dict[int, Prediction] = {}
        for structure, indices in groups.items():
            chosen = [configurations[index] for index in indices]
            predictions = self._evaluate(structure, chosen, gpu, margin_fraction, profile)
            results.update(zip(indices, predictions, strict=True))
        return [results[index] for index in range(len(configurations))]

    def _structure(self, configuration: Configuration, gpu: Gpu) -> Structure:
        return Structure.of(
            configuration,
            window=self._architecture.sliding_window,
            positions=self._architecture.positions,
            compute_capability=gpu.compute_capability,
        )

    # -- compiling --------------------------------------------------------------------------

    def _prepare(self, requests: Sequence[_Request], on_progress: OnProgress | None) -> None:
        """Have a compiled timeline, and replays of the allocator, for each request."""
        open_requests = []
        for request in requests:
            self._load(request.structure)
            passes = self._passes.get(request.structure)
            if passes is None or request.missing(passes, self._replayed[request.structure]):
                open_requests.append(replace(request, passes=passes))
        done = len(requests) - len(open_requests)
        if on_progress is not None and open_requests:
            on_progress(done, len(requests))
        for request, passes, replayed in self._answered(open_requests):
            self._store(request.structure, passes, replayed)
            done += 1
            if on_progress is not None:
                on_progress(done, len(requests))

    def _load(self, structure: Structure) -> None:
        if structure in self._passes:
            return
        self._replayed[structure] = _read_replays(self._entry("replays", structure))
        stored = _read_passes(self._entry("passes", structure))
        if stored is not None:
            self._passes[structure] = stored

    def _store(
        self, structure: Structure, passes: CompiledPasses | str, replayed: dict[Point, Replays]
    ) -> None:
        if isinstance(passes, CompiledPasses) and structure not in self._passes:
            cache.write_arrays(self._entry("passes", structure), passes.to_arrays())
        self._passes[structure] = passes
        if replayed:
            self._replayed[structure].update(replayed)
            rows = [[*point, *found] for point, found in self._replayed[structure].items()]
            cache.write_json(self._entry("replays", structure), rows)

    def _answered(
        self, requests: Sequence[_Request]
    ) -> Iterable[tuple[_Request, CompiledPasses | str, dict[Point, Replays]]]:
        if not requests:
            return
        needs_tracing = any(request.passes is None for request in requests)
        if needs_tracing:
            self._resolved()
        if self._workers < 2 or len(requests) < 2:
            for request in requests:
                yield request, *_answer(self._subject, request, self._known(request))
            return
        # Forked after the imports, so that only this process pays for them.
        if needs_tracing:
            _quieten_threads()
        with concurrent.futures.ProcessPoolExecutor(
            min(self._workers, len(requests)),
            mp_context=multiprocessing.get_context("fork"),
            initializer=_set_subject,
            initargs=(self._subject,),
        ) as pool:
            futures = {pool.submit(_answer_in_worker, r, self._known(r)): r for r in requests}
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], *future.result()

    def _known(self, request: _Request) -> dict[Point, Replays]:
        return self._replayed[request.structure]

    def _resolved(self) -> Subject:
        if self._subject is None:
            self._subject = resolve_subject(self._job.workload, self._job.model)
        return self._subject

    def _entry(self, kind: str, structure: Structure) -> str:
        return cache.entry_name(kind, self._job.workload, self._architecture.digest, structure.key)

    def _optimizer(self, configuration: Configuration, passes: CompiledPasses) -> CompiledOptimizer:
        point = np.array([[1.0, 1.0, float(str(configuration.get("lora_rank", 0)))]])
        numels = passes.trainable.at(point)[:, 0].round().astype(int).tolist()
        name, clip = str(configuration["optimizer"]), float(str(configuration["max_grad_norm"]))
        counts, dtypes = passes.trainable_counts.tolist(), passes.trainable_dtypes
        sizes = list(zip(numels, counts, dtypes, strict=True))
        key = cache.entry_name("optimizer", name, str(clip > 0), repr(sizes))
        if key not in self._optimizers:
            self._optimizers[key] = _read_optimizer(key) or _build_optimizer(key, name, sizes, clip)
        return self._optimizers[key]

    # -- evaluating -------------------------------------------------------------------------

    def _evaluate(
        self,
        structure: Structure,
        configurations: Sequence[Configuration],
        gpu: Gpu,
        margin_fraction: float | None,
        profile: DeviceProfile | None,
    ) -> list[Prediction]:
        passes = self._passes[structure]
        if isinstance(passes, str):
            return [
                _fallback(passes, self._resolved(), configuration, gpu, margin_fraction, profile)
                for configuration in configurations
            ]
        gpu, kernel_times, rates = on_measured_device(gpu, profile)
        evaluation = _Evaluation(passes, structure, configurations, gpu, self._replayed[structure])
        known: dict[tuple[Any, ...], CompiledOptimizer] = {}
        optimizers = []
        for configuration in configurations:
            asked = tuple(
                configuration.get(k, 0) for k in ("optimizer", "max_grad_norm", "lora_rank")
            )
            if asked not in known:
                known[asked] = self._optimizer(configuration, passes)
            optimizers.append(known[asked])
        times = evaluation.times(optimizers, kernel_times)
        return [
            build_prediction(
                evaluation.memory(index, optimizer),
                speed_of(times, index, self._job.workload, configuration, gpu),
                gpu,
                params=evaluation.params(index),
                method=method_text(f"{METHOD}; {rates}", self._job.workload, configuration),
                margin_fraction=margin_fraction,
            )
            for index, (configuration, optimizer) in enumerate(
                zip(configurations, optimizers, strict=True)
            )
        ]


class _Evaluation:
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
        points = np.array([_point(c) for c in configurations], dtype=float)
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
        self._params = passes.trainable_params(unique), passes.frozen_params(unique)
        self._works = WorkArrays.of_compiled(passes, unique)

    def params(self, index: int) -> tuple[int, int]:
        """Trainable and total parameters of a configuration."""
        trainable, frozen = (round(float(n[self._place[index]])) for n in self._params)
        return trainable, trainable + frozen

    def times(
        self, optimizers: Sequence[CompiledOptimizer], kernel_times: KernelTimes | None
    ) -> StepTimes:
        """Step times of all configurations, given the optimizer step of each."""
        times = kernel_times or Roofline()
        passes = pass_times(
            self._works,
            self._passes.executions,
            self._gpu,
            allow_tf32=self._allow_tf32,
            times=times,
        )
        optimizer_s = {}
        for optimizer in dict.fromkeys(optimizers):
            arrays, executions = work_arrays(optimizer)
            seconds = times.seconds(arrays, self._gpu, allow_tf32=self._allow_tf32)
            optimizer_s[optimizer] = float((executions @ seconds)[0])
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
            breakdown={str(category): size for category, size in breakdown.items()},
            paged_bytes=optimizer.paged_bytes,
        )

    def _peaks(self, accumulates: bool) -> _Peaks:
        """The peaks at every point, with one micro-step or with more."""
        if accumulates not in self._known_peaks:
            self._known_peaks[accumulates] = self._find_peaks(accumulates)
        return self._known_peaks[accumulates]

    def _find_peaks(self, accumulates: bool) -> _Peaks:
        passes = self._passes
        numbers = [n for n, s in enumerate(SEGMENTS) if accumulates or s.micro_step == 0]
        chosen = {
            phase: [n for n in numbers if SEGMENTS[n].phase is phase]
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        }
        by_phase, breakdown = {}, {}
        for phase, segments in {Phase.LOAD: [LOADING], **chosen}.items():
            rows = np.nonzero(np.isin(passes.segments, segments))[0]
            winners = rows[self._live[rows].argmax(axis=0)]
            by_phase[phase] = self._live[rows].max(axis=0).round().astype(int).tolist()
            sizes = np.einsum("pcu,up->pc", passes.counts[winners], self._block_bytes)
            breakdown[phase] = _whole(sizes)
        end = 2 if accumulates else 1
        sizes = np.einsum("cu,up->pc", passes.ends[end], self._block_bytes)
        breakdown[Phase.OPTIMIZER] = _whole(sizes)
        return _Peaks(by_phase, breakdown, end=self._ends[end].round().astype(int).tolist())


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


@dataclass(frozen=True, slots=True)
class _Request:
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


def _point(configuration: Configuration) -> Point:
    batch, length, rank = (
        int(str(configuration.get(name, 0))) for name in ("micro_batch", "max_length", "lora_rank")
    )
    return batch, length, rank


def _fallback(
    reason: str,
    subject: Subject,
    configuration: Configuration,
    gpu: Gpu,
    margin_fraction: float | None,
    profile: DeviceProfile | None,
) -> Prediction:
    prediction = predict(
        subject, configuration, gpu, margin_fraction=margin_fraction, profile=profile
    )
    return replace(prediction, method=f"{prediction.method} ({FALLBACK}: {reason})")


def _compile_one(subject: Subject, structure: Structure) -> CompiledPasses | str:
    """The compiled structure, or the reason why there is none."""
    from tuner.estimate.compile import CompileError, compile_passes

    try:
        return compile_passes(subject.workload, subject.model_config, structure)
    except CompileError as error:
        return str(error)


def _answer(
    subject: Subject | None, request: _Request, known: Mapping[Point, Replays]
) -> tuple[CompiledPasses | str, dict[Point, Replays]]:
    """Compile what is not compiled yet, and replay the allocator where it is not known."""
    passes = request.passes
    if passes is None:
        assert subject is not None
        passes = _compile_one(subject, request.structure)
    if isinstance(passes, str):
        return passes, {}
    return passes, replay_all(passes, request.missing(passes, known))


_worker_subject: Subject | None = None
"""The subject of a compiling process; set once when the process starts."""


def _set_subject(subject: Subject | None) -> None:
    global _worker_subject  # noqa: PLW0603  (one job per process of the pool)
    _worker_subject = subject


def _answer_in_worker(
    request: _Request, known: Mapping[Point, Replays]
) -> tuple[CompiledPasses | str, dict[Point, Replays]]:
    return _answer(_worker_subject, request, known)


def _quieten_threads() -> None:
    """One torch thread a process: tensors without data need none, and forks need few."""
    import gc

    import torch

    torch.set_num_threads(1)
    # What is imported stays: the collector of the forks need not look at it again.
    gc.collect()
    gc.freeze()


def _read_passes(entry: str) -> CompiledPasses | None:
    arrays = cache.read_arrays(entry)
    if arrays is None:
        return None
    try:
        return CompiledPasses.from_arrays(arrays)
    except (KeyError, TypeError, ValueError, IndexError):
        cache.delete(entry)
        return None


def _read_replays(entry: str) -> dict[Point, Replays]:
    stored = cache.read_json(entry)
    if stored is None:
        return {}
    try:
        return {
            (int(b), int(s), int(r)): (Replayed(*map(int, once)), Replayed(*map(int, more)))
            for b, s, r, once, more in stored
        }
    except (TypeError, ValueError):
        cache.delete(entry)
        return {}


def _read_optimizer(entry: str) -> CompiledOptimizer | None:
    stored = cache.read_json(entry)
    if stored is None:
        return None
    try:
        return CompiledOptimizer.from_dict(stored)
    except (KeyError, TypeError, ValueError):
        cache.delete(entry)
        return None


def _build_optimizer(
    entry: str, name: str, sizes: Sequence[tuple[int, int, str]], clip: float
) -> CompiledOptimizer:
    import torch

    trainable: Counter[tuple[int, torch.dtype]] = Counter()
    for numel, count, dtype in sizes:
        trainable[numel, getattr(torch, dtype)] += count
    compiled = compile_optimizer(name, trainable, max_grad_norm=clip)
    cache.write_json(entry, compiled.to_dict())
    return compiled


def default_workers() -> int:
    """Processes that compile at once: one per core this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
