"""Details of one step: its most expensive operators, and its memory over time by purpose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tuner.core.gpu import Gpu
from tuner.core.records.reading import read, written
from tuner.cost.operators.timeline import MASK
from tuner.cost.speed.rates import MASKED, rate_of, tile_use
from tuner.cost.speed.roofline import Efficiency, KernelTimes, Roofline, StepWork
from tuner.cost.work_arrays import SEGMENTS, WorkArrays

MOST_EXPENSIVE = 5

LIMITS = ("arithmetic", "power limit", "memory traffic", "launch")
"""Limits of a kernel's time: see `Roofline`."""

_LOSS = ("log_softmax", "nll_loss", "cross_entropy")
_WORTH_SAYING = 0.9
"""Tiles and waves that are used to this share leave nothing to say."""


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """The calls of one kind in a step: how many, and their seconds in all.

    `share` is that of the step. `limited_by` is one of `LIMITS`, and `cheaper` what would make it
    cheaper, in words; both are empty where nobody knows.
    """

    label: str
    kind: str
    calls: int
    seconds: float
    share: float
    limited_by: str = ""
    cheaper: str = ""
    recomputed: float = 0.0
    """The share of the calls that repeat a checkpointed forward."""


@dataclass(slots=True)
class _Group:
    """Operators that are shown as one: those of one name, type and, of products, sizes."""

    row: int
    """One of them."""
    calls: int = 0
    recomputed: int = 0
    seconds: float = 0.0
    by_limit: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def most_expensive(
    work: StepWork,
    gpu: Gpu,
    times: KernelTimes,
    *,
    grad_accum: int,
    step_s: float,
    allow_tf32: bool = False,
) -> tuple[OperatorTime, ...]:
    """The kinds of operators that take most of an optimizer step of `step_s` seconds.

    `work` is at one point. Products are alike that multiply matrices of the same sizes, in
    whichever order; other operators that have the same name and type.
    """
    works = work.passes.joined(work.optimizer)
    repeats = np.array([1 if s.micro_step == 0 else grad_accum - 1 for s in SEGMENTS])
    passes = np.einsum("s,sgw->gw", repeats, work.executions)
    passes = np.pad(passes, ((0, 0), (0, len(work.optimizer_executions))))
    updates = np.pad(work.optimizer_executions, (len(work.passes.names), 0))
    calls = passes.sum(axis=0) + updates
    in_pass_s, in_update_s = (
        times.seconds(works, gpu, allow_tf32=allow_tf32, streams=streams)[:, 0]
        for streams in (False, True)
    )
    seconds = passes.sum(axis=0) * in_pass_s + updates * in_update_s
    limits = _limits(works, gpu, allow_tf32)
    groups: dict[tuple[Any, ...], _Group] = {}
    for row in np.flatnonzero(calls).tolist():
        group = groups.setdefault(_alike(works, row), _Group(row))
        group.calls += int(calls[row])
        group.recomputed += int(passes[1, row])
        group.seconds += float(seconds[row])
        group.by_limit[limits[row]] += float(seconds[row])
    first = sorted(groups.values(), key=lambda group: -group.seconds)[:MOST_EXPENSIVE]
    used = tile_use(works, gpu, Efficiency().tile, fill=0.0)[:, 0]
    found = []
    for group in first:
        limit = max(group.by_limit, key=group.by_limit.__getitem__)
        cheaper = _cheaper(works, group.row, limit, gpu, allow_tf32, float(used[group.row]))
        found.append(
            OperatorTime(
                label=_label(works, group.row),
                kind=str(works.kinds[group.row]),
                calls=group.calls,
                seconds=group.seconds,
                share=group.seconds / step_s,
                limited_by=limit,
                cheaper=cheaper,
                recomputed=group.recomputed / group.calls,
            )
        )
    return tuple(found)


def _alike(works: WorkArrays, row: int) -> tuple[Any, ...]:
    sizes = tuple(sorted(works.shapes[row, :, 0].tolist())) if works.has_shape[row] else ()
    return works.names[row], works.dtypes[row], sizes


def _label(works: WorkArrays, row: int) -> str:
    """As in "mm of 2048 x 5376 x 21504, bfloat16", "mul, float32"."""
    name = str(works.names[row]).removeprefix("_").removesuffix(MASK)
    masked = MASK if str(works.names[row]).endswith(MASK) else ""
    if not works.has_shape[row]:
        return f"{name}, {works.dtypes[row]}"
    batch, *sizes = (int(size) for size in works.shapes[row, :, 0])
    many = f"{batch} times " if batch > 1 else ""
    if works.kinds[row] != "attention":
        sizes.sort()
    return f"{name}{masked} of {many}{' x '.join(map(str, sizes))}, {works.dtypes[row]}"


def _limits(works: WorkArrays, gpu: Gpu, allow_tf32: bool) -> list[str]:
    """The one of `LIMITS` that decides each operator's time, by the GPU's data sheet."""
    roofline = Roofline()
    bounds = roofline.bounds(works, gpu, allow_tf32)
    each = [*(bound[:, 0] for bound in bounds), np.full(len(works.kinds), roofline.shortest_s)]
    return [LIMITS[place] for place in np.argmax(each, axis=0).tolist()]


def _cheaper(  # noqa: PLR0911 - one answer for each class of kernel
    works: WorkArrays, row: int, limit: str, gpu: Gpu, allow_tf32: bool, used: float
) -> str:
    """A change that would make an operator cheaper; empty if only another GPU would."""
    name, kind = str(works.names[row]), str(works.kinds[row])
    if limit == "launch":
        return "a larger micro_batch"
    if kind == "dequantise":
        return "more tokens in a micro-step, or 16-bit weights"
    if name.endswith(MASK):
        return f"no dense mask: {1 / MASKED:.1f} times the rate"
    if kind == "elementwise" and any(word in name for word in _LOSS):
        return "a loss in chunks, or fused with the output head"
    if kind == "elementwise" and "_to_copy" in name:
        return "adapters and weights in the compute type"
    if limit == "memory traffic":
        return "fused kernels (torch_compile, liger)"
    rate = rate_of(gpu, str(works.dtypes[row]), allow_tf32)
    supported = [p for p in ("bf16", "fp16", "fp32") if p in gpu.flops]
    best = max(supported, key=gpu.flops.__getitem__)
    if rate == "fp32" and best != "fp32":
        return f"{best}: {gpu.flops[best] / gpu.flops[rate]:.0f} times the peak"
    if limit == "arithmetic" and used < _WORTH_SAYING:  # the idle part draws no power
        return f"sizes that fill whole tiles and waves: {used:.0%} of them is used"
    return ""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase of the step and when it runs, in seconds from the step's start."""

    phase: str
    micro_step: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Predicted memory at moments of one optimizer step.

    `categories` maps a name of `MemoryCategory` to its allocated bytes at each of `times_s`;
    `reserved_bytes` is what the allocator holds then. Of an optimizer step with many micro-steps
    the first and one further are shown: the others repeat the latter. Managed memory of paged
    optimizers and the CUDA context are in neither.
    """

    times_s: tuple[float, ...]
    categories: Mapping[str, tuple[int, ...]]
    reserved_bytes: tuple[int, ...]
    spans: tuple[PhaseSpan, ...]
    operators: tuple[OperatorTime, ...] = ()
    """The operators that take most of the step's time; empty unless requested."""

    @property
    def totals(self) -> tuple[int, ...]:
        """Allocated bytes in all, at each moment."""
        return tuple(map(sum, zip(*self.categories.values(), strict=True)))

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "times_s": list(self.times_s),
            "categories": {name: list(sizes) for name, sizes in self.categories.items()},
            "reserved_bytes": list(self.reserved_bytes),
            "spans": [[s.phase, s.micro_step, s.start_s, s.end_s] for s in self.spans],
            "operators": [written(operator) for operator in self.operators],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MemoryTimeline:
        """The inverse of `to_dict`. Raises `KeyError`, `TypeError` or `ValueError`."""
        return cls(
            times_s=tuple(map(float, data["times_s"])),
            categories={str(k): tuple(map(int, v)) for k, v in data["categories"].items()},
            reserved_bytes=tuple(map(int, data["reserved_bytes"])),
            spans=tuple(
                PhaseSpan(str(phase), int(micro_step), float(start), float(end))
                for phase, micro_step, start, end in data["spans"]
            ),
            operators=tuple(read(OperatorTime, each) for each in data.get("operators", ())),
        )
