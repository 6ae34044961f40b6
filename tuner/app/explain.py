"""Explains why a configuration does not fit, what would make it fit, and what slows it down."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.app.predicting import (
    Predicted,
    SpacePredictor,
    Suggestion,
    allowed,
    alternatives,
    paired_changes,
    reentrant_change,
    single_changes,
)
from tuner.core.expressions import show
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, Measurement, Prediction
from tuner.core.records.reading import written
from tuner.core.units import format_size, significant
from tuner.cost.memory import category_of, live_at_peak
from tuner.cost.operators.timeline import Timeline
from tuner.cost.speed.kernel_times import on_measured_device
from tuner.cost.speed.roofline import StepWork
from tuner.cost.step_details import OperatorTime
from tuner.predict.memory_timeline import operators_of
from tuner.predict.predict import step_work
from tuner.predict.predictor import COMPILED_TOLERANCE
from tuner.predict.shipped import can_trace
from tuner.predict.training import get_workload
from tuner.space import SearchSpace
from tuner.space.models.catalogue import resolve_config

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class PeakAllocation:
    """`count` allocations of `size_bytes` each that are alike.

    `place` is the parameter, or the module whose forward made it, with * for layer numbers (empty
    in backward passes and optimizers). `made_by` is the operator; loaded weights have none. Of a
    compiled timeline only sizes and category are known.
    """

    size_bytes: int
    count: int
    category: str
    phase: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    made_by: str = ""
    place: str = ""

    @property
    def total_bytes(self) -> int:
        """The size of all."""
        return self.size_bytes * self.count

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        data = written(self)
        sizes = {"size_bytes": data.pop("size_bytes"), "count": data.pop("count")}
        return {**sizes, "total_bytes": self.total_bytes, **data}


MOST_ALLOCATIONS = 8
"""Kinds of allocations that are shown."""


def largest_allocations(
    timeline: Timeline, *, number: int = MOST_ALLOCATIONS
) -> list[PeakAllocation]:
    """The largest kinds of allocations at the peak, by the size of a single one."""
    alike = Counter(
        PeakAllocation(
            size_bytes=block.size_bytes,
            count=1,
            category=str(category_of(block)),
            phase=str(block.born_phase),
            shape=block.shape,
            dtype=str(block.dtype).removeprefix("torch.") if block.dtype is not None else "",
            made_by=block.made_by,
            place=_LAYER_NUMBER.sub("*", block.place),
        )
        for block in live_at_peak(timeline)
    )
    return _largest((replace(kind, count=count) for kind, count in alike.items()), number)


def _largest(kinds: Iterable[PeakAllocation], number: int) -> list[PeakAllocation]:
    return sorted(kinds, key=lambda kind: (-kind.size_bytes, -kind.count))[:number]


LEAST_SHARE = 0.01
"""Parts of a step smaller than this get no note."""

_TFLOPS = 1e12


@dataclass(frozen=True, slots=True)
class Note:
    """One cause of lost time: its name, its share, and the sentence about it."""

    kind: str
    share: float
    text: str


def speed_notes(
    space: SearchSpace,
    configuration: Configuration,
    prediction: Prediction,
    gpu: Gpu,
    *,
    changes: Sequence[Suggestion] = (),
    measured: Measurement | None = None,
) -> list[Note]:
    """The causes that slow `configuration` down, the largest share first.

    `changes` are predictions of its neighbours, and `measured` is its trial on a device.
    """
    notes = [
        *_parts(prediction, changes),
        *_tensor_cores(configuration, prediction, gpu),
        *_padding(space, configuration),
        *_loader(configuration, prediction, measured),
    ]
    return sorted(notes, key=lambda note: -note.share)


def compute_precision(configuration: Configuration) -> str:
    """The precision of most matrix products, a key of `Gpu.flops`."""
    precision = str(configuration.get("precision", "fp32"))
    mixed = str(configuration.get("mixed_precision", "no"))
    if precision in ("nf4", "int8"):
        wanted = str(configuration.get("compute_dtype", "auto"))
        if precision == "int8":
            return "int8"
        if wanted != "auto":
            return wanted
        return mixed if mixed != "no" else "bf16"
    return mixed if mixed != "no" else precision


def _parts(prediction: Prediction, changes: Sequence[Suggestion]) -> Iterator[Note]:
    """Parts of the predicted step that are not arithmetic of the model."""
    for kind, text in (
        ("launch", "the GPU waits for the host to start kernels (launch-bound); {fix}"),
        ("recompute", "gradient checkpointing runs forward passes again; {fix}"),
        ("dequantise", "quantised weights are unpacked for their products; {fix}"),
        ("elementwise", "kernels that memory bandwidth limits (norms, copies, masks); {fix}"),
        ("optimizer", "the optimizer's own step; {fix}"),
    ):
        share = _share(prediction, kind)
        if share < LEAST_SHARE:
            continue
        fix = _fix(kind, changes)
        yield Note(kind, share, f"{share:.1%} of the step: {text.format(fix=fix)}".rstrip("; "))


def _share(prediction: Prediction, kind: str) -> float:
    total_s = sum(prediction.speed.breakdown_s.values())
    return prediction.speed.breakdown_s.get(kind, 0.0) / total_s if total_s > 0 else 0.0


_REMEDIES = {
    "launch": "micro_batch",
    "recompute": "gradient_checkpointing",
    "dequantise": "precision",
    "optimizer": "optimizer",
}
"""The knob that changes each part of the step."""


def _fix(kind: str, changes: Sequence[Suggestion]) -> str:
    """The effect of the fastest other value of the knob behind `kind`."""
    knob = _REMEDIES.get(kind)
    others = [c for c in changes if list(c.settings) == [knob] and c.lost < 0]
    if not others:
        return ""
    best = min(others, key=lambda c: c.lost)
    fits = "fits" if best.prediction.fits else "does not fit"
    return (
        f"{best} would be {-best.lost:.1%} faster and {fits} "
        f"({format_size(best.prediction.memory.device_bytes)})"
    )


def _tensor_cores(configuration: Configuration, prediction: Prediction, gpu: Gpu) -> Iterator[Note]:
    """Matrix products without tensor cores, on a GPU that has them for other precisions."""
    if gpu.compute_capability < (7, 0):
        return  # a processor, or a GPU before there were any
    precision = compute_precision(configuration)
    share = _share(prediction, "matmul")
    rates = {p: gpu.flops[p] for p in ("tf32", "fp16", "bf16") if p in gpu.flops}
    plain = gpu.flops.get("fp32")
    if (precision in rates or precision == "int8") or not rates or not plain or not share:
        return
    best = max(rates, key=rates.__getitem__)
    if rates[best] <= plain:
        return
    yield Note(
        "no_tensor_cores",
        share,
        f"{share:.1%} of the step are matrix products in {precision}, for which {gpu.name} has no "
        f"tensor cores: {plain / _TFLOPS:.3g} TFLOP/s, where {best} has "
        f"{rates[best] / _TFLOPS:.3g} ({rates[best] / plain:.1f} x)",
    )


def _padding(space: SearchSpace, configuration: Configuration) -> Iterator[Note]:
    lengths = space.data.token_lengths
    if lengths is None or "max_length" not in configuration:
        return
    batch, length = (int(str(configuration[name])) for name in ("micro_batch", "max_length"))
    mode = str(configuration.get("padding", space.data.padding or "longest"))
    share = lengths.batch(batch, length, mode).padding_share
    if share.high < LEAST_SHARE:
        return
    exact = share.low == share.high
    text = f"{share.high:.1%}" if exact else f"between {share.low:.0%} and {share.high:.0%}"
    why = "" if exact else "; only mean and maximum of the lengths are known"
    target = "max_length" if mode == "max_length" else "the longest example of each micro-batch"
    yield Note("padding", share.high, f"{text} of the tokens are padding to {target}{why}")


def _loader(
    configuration: Configuration, prediction: Prediction, measured: Measurement | None
) -> Iterator[Note]:
    """The measured wait for data, and the rate that a single loader has to reach."""
    share = measured.data_wait_fraction if measured is not None else None
    if share is not None and share >= LEAST_SHARE:
        yield Note("data_loader", share, f"{share:.1%} of the measured steps waited for data")
    workers = configuration.get("num_workers")
    if isinstance(workers, int) and workers <= 1:
        rate = significant(prediction.speed.samples_per_s)
        who = "the training process itself" if workers == 0 else "one loader process"
        yield Note(
            "loader_workers", 0.0, f"num_workers={workers}: {who} has to prepare {rate} samples/s"
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """One configuration on one GPU, explained without running it.

    `allocations` and `operators` are the largest of the stage that needs most memory. `changes` are
    all changes of a single knob; `pairs` those of two knobs that fit, when no single one does.
    `not_told` says in sentences what only a trace would tell.
    """

    current: Predicted
    allocations: Sequence[PeakAllocation]
    operators: Sequence[OperatorTime]
    changes: Sequence[Suggestion]
    pairs: Sequence[Suggestion]
    notes: Sequence[Note]
    reentrant: Suggestion | None
    not_told: Sequence[str] = ()

    @property
    def prediction(self) -> Prediction:
        """The prediction without any change."""
        return self.current.prediction

    @property
    def missing_bytes(self) -> int:
        """The missing device memory, margin included; negative when it fits."""
        p = self.prediction
        return p.memory.device_bytes - p.budget.usable_bytes

    @property
    def fitting(self) -> list[Suggestion]:
        """The single changes that fit."""
        return [change for change in self.changes if change.prediction.fits]

    @property
    def smallest(self) -> Suggestion | None:
        """The single change that needs the least memory."""
        return min(self.changes, key=lambda c: c.prediction.memory.device_bytes, default=None)

    def shares(self) -> list[tuple[str, int, float]]:
        """The parts of the peak, largest first: (category, bytes, share)."""
        memory = self.prediction.memory
        parts = sorted(memory.breakdown.items(), key=lambda part: -part[1])
        return [(name, size, size / memory.device_bytes) for name, size in parts if size]

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        prediction = self.prediction
        return {
            "configuration": self.current.configuration.to_dict(),
            "stage": self.prediction.limiting_stage,
            "fits": prediction.fits,
            "missing_bytes": self.missing_bytes,
            "peak_phase": prediction.memory.peak_phase,
            "breakdown": [
                {"category": name, "bytes": size, "share": share}
                for name, size, share in self.shares()
            ],
            "largest_allocations": [a.to_dict() for a in self.allocations],
            "changes_that_fit": [c.to_dict() for c in self.fitting],
            "pairs_that_fit": [c.to_dict() for c in self.pairs],
            "reentrant_checkpointing": self.reentrant.to_dict() if self.reentrant else None,
            "smallest_change": self.smallest.to_dict() if self.smallest else None,
            "most_expensive_operators": [written(each) for each in self.operators],
            "slowed_by": [written(note) for note in self.notes],
            "not_told": list(self.not_told),
            "prediction": prediction.to_dict(),
        }


def explain(
    predictor: SpacePredictor,
    configuration: Configuration,
    *,
    measured: Mapping[Configuration, Measurement] | None = None,
) -> Explanation:
    """Explain `configuration`; `measured` has trials on a device, by configuration.

    Raises `InputError` when the GPU cannot run it at all.
    """
    space, gpu = predictor.space, predictor.gpu
    (current,) = predictor.trace([configuration])
    changes = single_changes(predictor, current)
    pairs: list[Suggestion] = []
    are_paired = not current.prediction.fits and not any(c.prediction.fits for c in changes)
    if are_paired:
        pairs = [c for c in paired_changes(predictor, current, changes) if c.prediction.fits]
    allocations, work = (_traced if can_trace() else _compiled)(predictor, current.hardest)
    on_gpu, times, _ = on_measured_device(gpu, predictor.profile)
    return Explanation(
        current=current,
        allocations=allocations,
        operators=operators_of(work, current.hardest, on_gpu, times),
        changes=changes,
        pairs=pairs,
        reentrant=reentrant_change(predictor, current),
        notes=speed_notes(
            space,
            configuration,
            current.prediction,
            gpu,
            changes=changes,
            measured=(measured or {}).get(configuration),
        ),
        not_told=_not_told(predictor, current, are_paired=are_paired),
    )


def _traced(
    predictor: SpacePredictor, configuration: Configuration
) -> tuple[list[PeakAllocation], StepWork]:
    """The largest allocations and the work of a step, from its trace at full depth."""
    from tuner.predict.compiler.deepening import trace_deep  # torch

    space = predictor.space
    traced = trace_deep(
        get_workload(space.workload),
        resolve_config(space.predicted_model()),
        configuration,
        compute_capability=predictor.gpu.compute_capability,
    )
    return largest_allocations(traced.timeline), step_work(traced)


def _compiled(
    predictor: SpacePredictor, configuration: Configuration
) -> tuple[list[PeakAllocation], StepWork]:
    """The same from a compiled timeline, which has no tensors, operators and modules of blocks."""
    blocks, work = predictor.details(configuration)
    kinds = (PeakAllocation(size, count, str(category)) for size, count, category in blocks)
    return _largest(kinds, MOST_ALLOCATIONS), work


def _not_told(predictor: SpacePredictor, current: Predicted, *, are_paired: bool) -> list[str]:
    """Facts that the shipped timelines lack, if nothing can be traced."""
    if can_trace():
        return []
    found = [
        "tensor, operator and module of each allocation, allocations of the optimizer, and which "
        f"changes within {COMPILED_TOLERANCE:.0%} of the limit fit: they need a trace"
    ]
    asked = alternatives(predictor.space, current.configuration)
    changes = [
        f"{name}={show(value)}"
        for settings, changed in allowed(
            predictor.space, predictor.gpu, current.configuration, asked
        )
        if not predictor.answers(changed)
        for name, value in settings.items()
    ]
    if changes:
        found.append(f"changes that are not among the timelines of tuner: {', '.join(changes)}")
    if are_paired:
        found.append("pairs of changes that are not among the timelines of tuner")
    return found
