"""Predictions of a whole search space at once, from compiled timelines.

Configurations fall into a few dozen structures; each structure is compiled once (seconds,
in parallel processes), kept on disk, and evaluated for all its configurations and all GPUs
in milliseconds. A structure that does not compile is predicted by full traces instead, and
its predictions say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from tuner.core.errors import InputError, UnavailableError, install_command
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Doubt, Phase, Prediction
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.cost.compiled import CompiledPasses, Replays
from tuner.cost.correction import ALLOCATED, DEVICE, RESERVED
from tuner.cost.parallel import replicas
from tuner.cost.rank_memory import with_nccl
from tuner.cost.speed.kernel_times import on_measured_device
from tuner.cost.speed.profile import DeviceProfile
from tuner.predict import cache
from tuner.predict.cache import (
    build_optimizer,
    read_optimizer,
    read_passes,
    read_prediction,
    read_replays,
)
from tuner.predict.compiler.optimizer_step import CompiledOptimizer
from tuner.predict.compiler.structure import Point, Structure
from tuner.predict.compiling import Request, answers, trace_all
from tuner.predict.evaluation import Evaluation, gradient_bytes
from tuner.predict.predict import (
    Subject,
    Traces,
    build_prediction,
    doubts_of,
    has_polynomial_sizes,
    method_text,
    point_of,
    predict,
    require_supported,
    resolve_subject,
    speed_of,
)
from tuner.predict.shipped import can_trace, shipped
from tuner.space.models.catalogue import architecture, load_catalogue

METHOD = "compiled timeline, checked against a held-back trace"
FALLBACK = "this structure does not compile"

COMPILED_TOLERANCE = 0.05
"""Largest relative error of a compiled timeline's reserved memory against a full trace. At most
4.1 % on the 40 configurations of qlora27b on an A6000 that were traced, 1.4 % in the median."""

EVALUATION = str(Phase.EVALUATION)

MOST_TRACED = 200
"""Configurations under fsdp2 or ZeRO that are predicted at once: some minutes for a large model."""

OnProgress = Callable[[int, int], None]
"""Called with structures done and structures in all."""


@dataclass(frozen=True, slots=True)
class PredictionJob:
    """The subject of predictions: a workload and a model, by name; cheap to make and to send."""

    workload: str
    model: str


class Predictor:
    """Predicts configurations of one job. Keeps what it compiled in memory and on disk.

    `workers` processes compile; with fewer than two, this process does. Neither torch nor
    transformers is imported while every structure asked for is in the cache, or comes with tuner
    and is of the versions that are installed; with `anew` none of those is used.
    """

    def __init__(
        self,
        job: PredictionJob,
        *,
        workers: int = 0,
        anew: bool = False,
    ) -> None:
        self._job = job
        self._anew = anew
        self._workers = workers
        self._traces = Traces()
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
        how = partial(self._predict, gpu=gpu, margin_fraction=margin_fraction, profile=profile)
        found = how(configurations, on_progress=on_progress)
        # A full trace has the evaluation in it.
        evaluated = {
            place: _evaluating(configuration)
            for place, (configuration, one) in enumerate(zip(configurations, found, strict=True))
            if _has_forward(configuration) and EVALUATION not in one.memory.phase_peak_bytes
        }
        try:
            forwards = how([*evaluated.values()], forward=True)
        except UnavailableError:  # among the timelines that come with tuner there is none for it
            return found
        for place, forward in zip(evaluated, forwards, strict=True):
            found[place] = _with_evaluation(found[place], forward)
        return found

    def _predict(
        self,
        configurations: Sequence[Configuration],
        gpu: Gpu,
        margin_fraction: float | None,
        profile: DeviceProfile | None,
        on_progress: OnProgress | None = None,
        *,
        forward: bool = False,
    ) -> list[Prediction]:
        """Predictions of the steps, or of an evaluation's `forward` pass."""
        self._require_supported(configurations, gpu)
        groups: dict[Structure, list[int]] = {}
        traced = [i for i, c in enumerate(configurations) if _is_traced_in_full(c)]
        _check_traced_in_full(len(traced))
        for index, configuration in enumerate(configurations):
            if index in traced:
                continue
            groups.setdefault(self._structure(configuration, gpu), []).append(index)
        requests = [
            Request(structure, tuple(sorted({point_of(configurations[i]) for i in indices})))
            for structure, indices in groups.items()
        ]
        self._prepare(requests, on_progress)
        results: dict[int, Prediction] = {}
        for structure, indices in groups.items():
            chosen = [configurations[index] for index in indices]
            predictions = self._evaluate(
                structure, chosen, gpu, margin_fraction, profile, forward=forward
            )
            results.update(zip(indices, predictions, strict=True))
        for index in traced:
            results[index] = self._in_full(configurations[index], gpu, margin_fraction, profile)
        return [results[index] for index in range(len(configurations))]

    def _in_full(
        self,
        configuration: Configuration,
        gpu: Gpu,
        margin_fraction: float | None,
        profile: DeviceProfile | None,
    ) -> Prediction:
        return predict(
            self._resolved(),
            configuration,
            gpu,
            margin_fraction=margin_fraction,
            profile=profile,
            traces=self._traces,
        )

    def compiled(self) -> dict[tuple[str, str], CompiledPasses]:
        """The structures that compiled so far, by the model's digest and their key."""
        return {
            (self._architecture.digest, structure.key): passes
            for structure, passes in self._passes.items()
            if isinstance(passes, CompiledPasses)
        }

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
        """Predict from traces at full depth: seconds for each. The predictions are kept on disk.

        Without PyTorch nothing can be traced, and the compiled timelines of the package answer.
        """
        self._require_supported(configurations, gpu)
        entries = [
            cache.entry_name(
                "traced" if can_trace() else shipped().checksum,
                self._job.workload,
                self._architecture.digest,
                configuration.key,
                repr((gpu, margin_fraction, profile)),
            )
            for configuration in configurations
        ]
        found = [read_prediction(entry) for entry in entries]
        missing = [place for place, prediction in enumerate(found) if prediction is None]
        if missing:
            chosen = [configurations[place] for place in missing]
            if can_trace():
                traced = trace_all(
                    self._resolved(),
                    chosen,
                    gpu,
                    self._traces,
                    workers=self._workers,
                    margin_fraction=margin_fraction,
                    profile=profile,
                )
            else:
                traced = self.predict(chosen, gpu, margin_fraction=margin_fraction, profile=profile)
            for place, prediction in zip(missing, traced, strict=True):
                cache.write_json(entries[place], prediction.to_dict())
                found[place] = prediction
        return [prediction for prediction in found if prediction is not None]

    def _require_supported(self, configurations: Sequence[Configuration], gpu: Gpu) -> None:
        for configuration in configurations:
            require_supported(configuration, gpu, model=self._architecture)

    def _structure(self, configuration: Configuration, gpu: Gpu) -> Structure:
        return Structure.of(
            configuration,
            window=self._architecture.sliding_window,
            positions=self._architecture.positions,
            compute_capability=gpu.compute_capability,
        )

    def _prepare(self, requests: Sequence[Request], on_progress: OnProgress | None) -> None:
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
        if any(request.passes is None for request in open_requests):
            self._resolved()
        for request, (passes, replayed) in answers(
            open_requests, self._replayed, self._subject, workers=self._workers
        ):
            self._store(request.structure, passes, replayed)
            done += 1
            if on_progress is not None:
                on_progress(done, len(requests))

    @cached_property
    def _takes_shipped(self) -> bool:
        """True if a timeline that comes with tuner is as one made here would be."""
        return not self._anew and (not can_trace() or shipped().are_installed())

    def _load(self, structure: Structure) -> None:
        if structure in self._passes:
            return
        self._replayed[structure] = read_replays(self._entry("replays", structure))
        stored = read_passes(self._entry("passes", structure))
        if stored is None and self._takes_shipped:
            stored = shipped().passes(self._architecture.digest, structure.key)
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

    def _resolved(self) -> Subject:
        if self._subject is None:
            self._require_tracing("these settings are")
            self._subject = resolve_subject(self._job.workload, self._job.model)
        return self._subject

    def _require_tracing(self, what: str) -> None:
        """Raise `UnavailableError` where no library is installed to trace `what`."""
        if not can_trace():
            raise UnavailableError(
                f"{what} not among the compiled timelines that come with tuner for "
                f"{self._job.model}, and torch or transformers is not installed to trace them",
                hint=f"{install_command('all')}; without it, tuner knows common settings of "
                f"{', '.join(_shipped_models())}",
            )

    def _entry(self, kind: str, structure: Structure) -> str:
        return cache.entry_name(kind, self._job.workload, self._architecture.digest, structure.key)

    def _optimizer(self, configuration: Configuration, passes: CompiledPasses) -> CompiledOptimizer:
        rank = int(str(configuration.get("lora_rank", 0)))
        sizes = trained_sizes(passes, rank)
        name, clip = str(configuration["optimizer"]), float(str(configuration["max_grad_norm"]))
        scaled = configuration.get("mixed_precision") == "fp16"
        key = cache.entry_name("optimizer", name, str(clip > 0), str(scaled), repr(sizes))
        if key not in self._optimizers:
            found = read_optimizer(key)
            if found is None and not can_trace():
                trained = partial(trained_sizes, passes)
                digest = self._architecture.digest
                found = shipped().optimizer(
                    digest, name, trained, rank, clip=clip > 0, scaled=scaled
                )
            if found is None:
                self._require_tracing(f"optimizer {name} is")
                found = build_optimizer(key, name, sizes, clip=clip, scaled=scaled)
            self._optimizers[key] = found
        return self._optimizers[key]

    def _evaluate(
        self,
        structure: Structure,
        configurations: Sequence[Configuration],
        gpu: Gpu,
        margin_fraction: float | None,
        profile: DeviceProfile | None,
        *,
        forward: bool,
    ) -> list[Prediction]:
        passes = self._passes[structure]
        if isinstance(passes, str):
            found = [self._in_full(c, gpu, margin_fraction, profile) for c in configurations]
            return [replace(p, method=f"{p.method} ({FALLBACK}: {passes})") for p in found]
        gpu, kernel_times, rates = on_measured_device(gpu, profile, structure.settings)
        remarks = passes.remarks if can_trace() else (shipped().remark, *passes.remarks)
        evaluation = Evaluation(passes, structure, configurations, gpu, self._replayed[structure])
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
        memory = [
            evaluation.forward_memory(index, optimizer, self._architecture.layers)
            if forward
            else evaluation.memory(index, optimizer)
            for index, optimizer in enumerate(optimizers)
        ]
        parallelism = [Parallelism.of(configuration) for configuration in configurations]
        if any(p.ranks > 1 for p in parallelism):
            sizes = [gradient_bytes(passes, configuration) for configuration in configurations]
            memory, times = replicas(memory, times, parallelism, sizes, gpu)
            pairs = zip(memory, configurations, strict=True)
            memory = [with_nccl(one, gpu, configuration) for one, configuration in pairs]
        return [
            build_prediction(
                memory[index],
                speed_of(times, index, self._job.workload, configuration, gpu),
                gpu,
                params=evaluation.params(index),
                method=method_text(
                    f"{METHOD}; {rates}", self._job.workload, configuration, gpu, remarks
                ),
                margin_fraction=margin_fraction,
                unknown=times.unknown(index),
                doubts={Doubt.COMPILED, *doubts_of(self._job.workload, configuration)},
            )
            for index, configuration in enumerate(configurations)
        ]


def _has_forward(configuration: Configuration) -> bool:
    """True for an evaluation that is a forward pass, and keeps no logits of several."""
    batch, kept = (int(str(configuration.get(name, 0))) for name in ("eval_batch", "eval_kept"))
    return batch > 0 and kept < 2


def _evaluating(configuration: Configuration) -> Configuration:
    """The training whose forward pass keeps as little as one of an evaluation."""
    batch = configuration["eval_batch"]
    own = {"micro_batch": batch, "effective_batch": batch, "grad_accum": 1}
    return Configuration({**configuration, **own, "gradient_checkpointing": True})


def _with_evaluation(steps: Prediction, forward: Prediction) -> Prediction:
    """The prediction of steps and of an evaluation between them."""
    if forward.memory.peak_phase != EVALUATION:  # it did not compile
        return steps
    larger = max(steps, forward, key=lambda one: one.memory.peak_allocated_bytes)
    phases = {**steps.memory.phase_peak_bytes, **forward.memory.phase_peak_bytes}
    ends = {name: larger.intervals[name] for name in (DEVICE, RESERVED, ALLOCATED)}
    return replace(
        steps,
        memory=replace(larger.memory, phase_peak_bytes=phases),
        intervals={**steps.intervals, **ends},
    )


def _shipped_models() -> list[str]:
    """The models of the catalogue whose timelines come with tuner."""
    digests = set(shipped().models())
    return [name for name in load_catalogue() if architecture(name).digest in digests]


def trained_sizes(passes: CompiledPasses, rank: int) -> list[tuple[int, int, str]]:
    """The parameters that are trained at this rank of LoRA: elements, number and kind of each."""
    numels = passes.trainable.sizes.at(np.array([[1.0, 1.0, float(rank), 1.0]]))[:, 0]
    counts, kinds = passes.trainable.counts.tolist(), passes.trainable_kinds
    return list(zip(numels.round().astype(int).tolist(), counts, kinds, strict=True))


def _is_traced_in_full(configuration: Configuration) -> bool:
    """True if sizes are not polynomials of those of a few layers.

    What is sharded is rounded, and some optimizers depend on shapes. An update in the backward
    pass is not one of all gradients, which compiled timelines add to the passes.
    """
    parallelism = Parallelism.of(configuration)
    is_shared = parallelism.ranks > 1 and not parallelism.is_replicated
    return is_shared or not has_polynomial_sizes(configuration)


def _check_traced_in_full(count: int) -> None:
    """Raise `InputError` for more configurations than anybody waits for, at seconds each."""
    if count > MOST_TRACED:
        raise InputError(
            f"{count} configurations with distributed fsdp2, hsdp or zero, or optimizer "
            f"adafactor would each be traced in full, which takes seconds each; at most "
            f"{MOST_TRACED} are",
            hint="narrow the search with --where or --set; others need no traces",
        )
