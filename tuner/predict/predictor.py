"""Predictions of a whole search space at once, from timelines of all sizes.

Configurations fall into a few dozen structures, whose timelines are traced once each (seconds, in
parallel processes) and kept on disk. Times and allocated memory of all configurations follow. What
the allocator holds beside that takes a replay: `REPLAYED` configurations of each structure get one,
and the others lie between them; none does where nothing of a structure can fit. A structure without
such a timeline is traced for each configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tuner.core.errors import InputError
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Doubt, KnobValue, Memory, Prediction
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL, MACHINES, Parallelism
from tuner.cost.interval import MEMORY_ERRORS
from tuner.cost.parallel import replicas, with_nccl
from tuner.cost.sized import SizedTimeline
from tuner.cost.speed.kernel_times import on_measured_device
from tuner.cost.speed.profile import DeviceProfile
from tuner.cost.speed.roofline import StepTimes
from tuner.predict import cache
from tuner.predict.compiler.structure import OPTIMIZER_KNOBS, Structure
from tuner.predict.compiling import in_forks, trace_all, trace_optimizers, trace_timelines
from tuner.predict.estimates import Estimates, with_overhead
from tuner.predict.predict import (
    build_prediction,
    doubts_of,
    method_text,
    predict,
    require_supported,
    speed_of,
)
from tuner.predict.shipped import can_trace, shipped
from tuner.predict.stages import Predict, StagedPrediction, predict_stages
from tuner.predict.traces import Subject, Traces, is_sized, remarks_of
from tuner.space import SearchSpace

METHOD = "timeline of all sizes at full depth, reserved memory between replays"

REPLAYED = 3
"""Configurations of a structure that are replayed, of those that fit: the smallest, the largest and
one between."""

NEVER_FITS = 1.02
"""Allocated memory over that of the GPU from which no replay is asked: estimates of it are less
than 0.5 % off, and what the allocator holds comes on top."""

FEW = 8
"""Up to this number of configurations, each is replayed itself."""

RESERVED_TOLERANCE = 0.05
"""Largest relative error of reserved memory between replays."""

MOST_TRACED = 200
"""Configurations under fsdp2 or ZeRO that are predicted at once: some minutes for a large model."""

OnProgress = Callable[[int, int], None]
"""Called with structures done and structures in all."""


class Predictor:
    """Predicts configurations of a workload and a model. Keeps traces in memory and on disk.

    `workers` processes trace; with fewer than two, this process does. Neither torch nor
    transformers is imported while every timeline asked for is on disk, or comes with tuner and is
    of the versions that are installed; with `anew` none of those is used.
    """

    def __init__(self, workload: str, model: str, *, workers: int = 0, anew: bool = False) -> None:
        self._workers = workers
        self._traces = Traces(Subject(workload, model), anew=anew)

    def predict(
        self,
        configurations: Sequence[Configuration],
        gpu: Gpu,
        *,
        margin_fraction: float | None = None,
        profile: DeviceProfile | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Prediction]:
        """A prediction of each configuration on `gpu`, in their order; kept on disk.

        A device profile replaces the catalogue's rates. Raises `InputError` when the GPU cannot
        run one of them.
        """
        how: dict[str, Any] = {"margin_fraction": margin_fraction, "profile": profile}
        if len(configurations) <= FEW and all(map(is_sized, configurations)):
            return self.traced(configurations, gpu, **how)
        entry = self._entry("estimated", configurations, gpu, how)
        found = cache.read_predictions(entry)
        if found is None:
            found = self._estimated(configurations, gpu, how, on_progress)
            cache.write_json(entry, [prediction.to_dict() for prediction in found])
        return found

    def require_timelines(self, configurations: Sequence[Configuration], gpu: Gpu) -> None:
        """Raise `UnavailableError` for one that needs a trace, if nothing is installed to trace."""
        if can_trace():
            return
        distinct: dict[Any, Configuration] = {}
        for one in map(_alone, configurations):
            structure = self._traces.structure(one, gpu)
            distinct.setdefault((structure, _optimizer_of(one)), one)
        for (structure, _), one in distinct.items():
            self._traces.require(structure, one)

    @property
    def at_once(self) -> int:
        """Number of configurations that `traced` works on at the same time."""
        return max(1, self._workers)

    def traced(
        self,
        configurations: Sequence[Configuration],
        gpu: Gpu,
        *,
        margin_fraction: float | None = None,
        profile: DeviceProfile | None = None,
    ) -> list[Prediction]:
        """As `predict`, with a replay of each: up to a second."""
        self._require_supported(configurations, gpu)
        how = {"margin_fraction": margin_fraction, "profile": profile}
        entries = [self._entry("traced", [each], gpu, how) for each in configurations]
        stored = [cache.read_predictions(entry) for entry in entries]
        found = [each[0] if each else None for each in stored]
        missing = [place for place, prediction in enumerate(found) if prediction is None]
        if missing:
            chosen = [configurations[place] for place in missing]
            traced = trace_all(chosen, gpu, self._traces, workers=self._workers, **how)
            for place, prediction in zip(missing, traced, strict=True):
                cache.write_json(entries[place], [prediction.to_dict()])
                found[place] = prediction
        return [prediction for prediction in found if prediction is not None]

    def _entry(
        self, kind: str, configurations: Sequence[Configuration], gpu: Gpu, how: dict[str, Any]
    ) -> str:
        return cache.entry_name(
            kind,
            "traced" if can_trace() else shipped().checksum,
            self._traces.subject.workload_name,
            self._traces.subject.architecture.digest,
            *(configuration.key for configuration in configurations),
            repr((gpu, *how.values())),
        )

    def _require_supported(self, configurations: Sequence[Configuration], gpu: Gpu) -> None:
        for configuration in configurations:
            require_supported(configuration, gpu, model=self._traces.subject.architecture)

    def _estimated(
        self,
        configurations: Sequence[Configuration],
        gpu: Gpu,
        how: dict[str, Any],
        on_progress: OnProgress | None,
    ) -> list[Prediction]:
        self._require_supported(configurations, gpu)
        places: dict[Structure | None, list[int]] = {}
        for index, configuration in enumerate(configurations):
            structure = self._traces.structure(_alone(configuration), gpu)
            places.setdefault(structure, []).append(index)
        groups = []
        for sized, indices in self._sized(places, on_progress):
            by_allocator: dict[KnobValue, list[int]] = {}
            for index in indices:
                allocator = configurations[index].get("allocator", "")
                by_allocator.setdefault(allocator, []).append(index)
            for some in by_allocator.values():
                groups.append(_Group(sized, tuple(some), tuple(configurations[n] for n in some)))
        wanted = [(group.sized, one) for group in groups for one in group.by_optimizer().values()]
        trace_optimizers(wanted, self._traces, workers=self._workers)
        estimated = {index for group in groups for index in group.indices}
        in_full = {i: c for i, c in enumerate(configurations) if i not in estimated}
        _check_traced_in_full(len(in_full))
        traced = self.traced([*in_full.values()], gpu, **how)
        results = dict(zip(in_full, traced, strict=True))
        known = groups, self._traces, gpu, how
        for place, (found, exact) in in_forks(
            _of_group, range(len(groups)), known, workers=self._workers, traces=False
        ):
            results.update(zip(groups[place].indices, found, strict=True))
            for one, prediction in exact:
                cache.write_json(self._entry("traced", [one], gpu, how), [prediction.to_dict()])
        return [results[index] for index in range(len(configurations))]

    def _sized(
        self, places: Mapping[Structure | None, list[int]], on_progress: OnProgress | None
    ) -> list[tuple[SizedTimeline, list[int]]]:
        """The timelines of structures, with the places of their configurations."""
        wanted = [structure for structure in places if structure is not None]
        missing = sum(self._traces.lacks(each) for each in wanted)
        done = len(wanted) - missing
        if on_progress is not None and missing:
            on_progress(done, len(wanted))
        for _ in trace_timelines(wanted, self._traces, workers=self._workers):
            done += 1
            if on_progress is not None:
                on_progress(done, len(wanted))
        found = ((self._traces.sized(each), places[each]) for each in wanted)
        return [(sized, indices) for sized, indices in found if sized is not None]


def _of_group(
    known: tuple[Sequence[_Group], Traces, Gpu, dict[str, Any]], place: int
) -> tuple[list[Prediction], list[tuple[Configuration, Prediction]]]:
    """The predictions of a group, and those of its configurations that were replayed."""
    groups, traces, gpu, how = known
    group, subject = groups[place], traces.subject
    group.estimate(traces, gpu, how["profile"])
    chosen = {one.key: one for one in map(_alone, group.to_replay())}
    exact = {key: predict(subject, one, gpu, traces=traces, **how) for key, one in chosen.items()}
    workload, gpu = subject.workload_name, group.gpu
    memory, times = group.on_ranks(group.between(exact))
    found = []
    for index, configuration in enumerate(group.configurations):
        if configuration.key in exact:
            found.append(exact[configuration.key])
            continue
        rest = workload, configuration, gpu, remarks_of(group.sized)
        found.append(
            build_prediction(
                memory[index],
                speed_of(times, index, workload, configuration, gpu),
                gpu,
                params=group.estimates.params(index),
                method=method_text(f"{METHOD}; {group.rates}", *rest),
                margin_fraction=how["margin_fraction"],
                unknown=times.unknown(index),
                doubts={Doubt.ESTIMATED, *doubts_of(workload, configuration)},
            )
        )
    return found, [(chosen[key], prediction) for key, prediction in exact.items()]


@dataclass(slots=True)
class _Group:
    """Configurations with one timeline, and what is estimated of each."""

    sized: SizedTimeline
    indices: tuple[int, ...]
    configurations: tuple[Configuration, ...]
    gpu: Gpu = field(init=False)
    rates: str = field(init=False)
    estimates: Estimates = field(init=False)
    memory: list[Memory] = field(init=False)
    times: StepTimes = field(init=False)

    def estimate(self, traces: Traces, gpu: Gpu, profile: DeviceProfile | None) -> None:
        """Estimate each configuration on this GPU, or on one as a profile says."""
        self.gpu, kernel_times, self.rates = on_measured_device(
            gpu, profile, self.configurations[0]
        )
        steps = {key: traces.optimizer(self.sized, one) for key, one in self.by_optimizer().items()}
        each = [steps[_optimizer_of(one)] for one in self.configurations]
        self.estimates = Estimates(self.sized, self.configurations, each, self.gpu)
        self.memory = self.estimates.memory()
        self.times = self.estimates.times(kernel_times)

    def by_optimizer(self) -> dict[tuple[KnobValue, ...], Configuration]:
        """One configuration for each optimizer and the parameters that it has."""
        return {_optimizer_of(one): one for one in self.configurations}

    def to_replay(self) -> list[Configuration]:
        """The smallest that fits, the largest and some between; the smallest if it nearly fits."""
        sizes = [one.peak_allocated_bytes for one in self.memory]
        if min(sizes) > NEVER_FITS * self.gpu.memory_bytes:
            return []
        names = [one.key for one in self.configurations]
        order = sorted(range(len(sizes)), key=lambda place: (sizes[place], names[place]))
        fitting = [place for place in order if sizes[place] <= self.gpu.memory_bytes] or order[:1]
        chosen = np.linspace(0, len(fitting) - 1, REPLAYED).round().astype(int).tolist()
        return [self.configurations[place] for place in dict.fromkeys(fitting[n] for n in chosen)]

    def between(self, traced: Mapping[str, Prediction]) -> list[Memory]:
        """The memory of each, with overheads on lines between those of the ones that are traced.

        Where none is, what the allocator holds is the least that it holds in published runs.
        """
        if not traced:
            held = MEMORY_ERRORS.least_gap / (1.0 - MEMORY_ERRORS.least_gap)
            return [
                with_overhead(one, 0, round(held * one.peak_allocated_bytes)) for one in self.memory
            ]
        known = {}
        for one, estimate in zip(self.configurations, self.memory, strict=True):
            if (exact := traced.get(_alone(one).key)) is not None:
                allocated = exact.memory.peak_allocated_bytes
                known[estimate.peak_allocated_bytes] = (
                    allocated - estimate.peak_allocated_bytes,
                    exact.memory.peak_reserved_bytes - allocated,
                )
        sizes = sorted(known)
        more, free = zip(*(known[size] for size in sizes), strict=True)
        return [
            with_overhead(
                one,
                round(np.interp(one.peak_allocated_bytes, sizes, more)),
                round(np.interp(one.peak_allocated_bytes, sizes, free)),
            )
            for one in self.memory
        ]

    def on_ranks(self, memory: list[Memory]) -> tuple[list[Memory], StepTimes]:
        """Memory and times on all GPUs of each configuration, which do the same."""
        ranks = [Parallelism.of(configuration) for configuration in self.configurations]
        if all(each.ranks == 1 for each in ranks):
            return memory, self.times
        gradients = self.estimates.gradient_bytes()
        memory, times = replicas(memory, self.times, ranks, gradients, self.gpu)
        pairs = zip(memory, self.configurations, strict=True)
        return [with_nccl(one, self.gpu, configuration) for one, configuration in pairs], times


def _optimizer_of(configuration: Configuration) -> tuple[KnobValue, ...]:
    return tuple(configuration.get(n, 0) for n in (*sorted(OPTIMIZER_KNOBS), "lora_rank"))


def _alone(configuration: Configuration) -> Configuration:
    """The configuration on one GPU, if several share only a sum of gradients."""
    if not Parallelism.of(configuration).is_replicated:
        return configuration
    return Configuration({**configuration, GPUS_PER_TRIAL: 1, MACHINES: 1})


def _check_traced_in_full(count: int) -> None:
    """Raise `InputError` for more configurations than anybody waits for, at seconds each."""
    if count > MOST_TRACED:
        raise InputError(
            f"{count} configurations with distributed fsdp2, hsdp or zero, or optimizer "
            f"adafactor would each be traced in full, which takes seconds each; at most "
            f"{MOST_TRACED} are",
            hint="narrow the search with --where or --set; others need no traces",
        )


@dataclass(frozen=True, slots=True)
class Predicted:
    """A configuration and its prediction.

    In a space with stages `staged` predicts each, and `prediction` covers all of them.
    """

    configuration: Configuration
    prediction: Prediction
    staged: StagedPrediction | None = None


class SpacePredictor:
    """Predicts configurations of one space on one GPU; traces each structure once.

    Predictors of several GPU types share what `predictor` has traced. Raises `InputError` for a
    configuration that the GPU cannot run.
    """

    def __init__(
        self,
        space: SearchSpace,
        gpu: Gpu,
        *,
        margin_fraction: float | None = None,
        profile: DeviceProfile | None = None,
        predictor: Predictor | None = None,
        workers: int = 0,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.space, self.gpu = space, gpu
        self._predictor = predictor or predictor_of(space, workers=workers)
        self._how: dict[str, Any] = {"margin_fraction": margin_fraction, "profile": profile}
        self._on_progress = on_progress

    @property
    def at_once(self) -> int:
        """Number of configurations that `trace` works on at the same time."""
        return self._predictor.at_once

    def require_timelines(self, configurations: Sequence[Configuration]) -> None:
        """As that of `Predictor`, for all stages."""
        stages = ([*self.space.stage_configurations(one).values()] for one in configurations)
        pairs = zip(configurations, stages, strict=True)
        every = [each for one, of_it in pairs for each in of_it or [one]]
        self._predictor.require_timelines(every, self.gpu)

    def predict(self, configurations: Sequence[Configuration]) -> list[Predicted]:
        """A prediction of each configuration, in their order; reserved memory is estimated."""
        how = functools.partial(self._predictor.predict, on_progress=self._on_progress)
        return self._predict(configurations, how)

    def trace(self, configurations: Sequence[Configuration]) -> list[Predicted]:
        """As `predict`, with a replay of each: up to a second."""
        return self._predict(configurations, self._predictor.traced)

    def _predict(
        self, configurations: Sequence[Configuration], ask: Callable[..., list[Prediction]]
    ) -> list[Predicted]:
        how: Predict = functools.partial(ask, gpu=self.gpu, **self._how)
        if not self.space.stages:
            found = how(configurations)
            return [Predicted(c, p) for c, p in zip(configurations, found, strict=True)]
        staged = predict_stages(self.space, configurations, how)
        return [
            Predicted(configuration, each.overall, each)
            for configuration, each in zip(configurations, staged, strict=True)
        ]


def predictor_of(space: SearchSpace, *, workers: int = 0) -> Predictor:
    """A new predictor of the space's workload and model, for any GPU type."""
    return Predictor(space.workload, space.predicted_model(), workers=workers)
