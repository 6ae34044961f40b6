"""Compiles traces of a shallow model into polynomials for a deep one.

For a fixed structure (model, precision, checkpointing, attention, ...) the sequence of
allocations does not depend on micro-batch b >= 2, length s or rank r, and each size is a
polynomial in them (`polynomial`). Adding a layer inserts the same events once into the
forward and once into the backward pass. So a few traces of a model with three or four
layers give, for the full depth and every (b, s, r), the memory at each moment that can be
the peak, and the work of each operator. A held-back trace, deeper and at another point,
checks the result each time.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np

from tuner.core.records import MemoryCategory
from tuner.cost.compiled import CATEGORIES, LOADING, CompiledPasses, Operators, Parameters
from tuner.cost.operators.timeline import Timeline, Work
from tuner.cost.polynomial import Polynomial, Probe, Terms, fit
from tuner.predict.compiler.layouts import (
    ALL_SEGMENTS,
    CompileError,
    Layout,
    Moments,
    SizeTable,
    WorkTable,
    category_index,
)
from tuner.predict.compiler.structure import Structure
from tuner.predict.tracing.trace import PassTrace, trace_passes
from tuner.predict.training.base import Workload

CHECK_TOLERANCE = 1e-6
"""Largest relative difference between compiled peaks and those of the held-back trace."""


def layer_types(model_config: Any) -> list[str]:
    """The kind of each layer in order; one kind for models that do not tell.

    Raises `CompileError` for models that are no single stack of layers.
    """
    text = model_config.get_text_config()
    types = getattr(text, "layer_types", None)
    layers = getattr(text, "num_hidden_layers", None)
    if layers is None:
        raise CompileError("its layers are not counted in one number")
    return list(types) if types else ["layer"] * layers


def with_layers(model_config: Any, types: list[str]) -> Any:
    """A copy of the configuration with these layers.

    Raises `CompileError` where it has others: their kinds follow from a period in some models.
    """
    config = copy.deepcopy(model_config)
    text = config.get_text_config()
    text.num_hidden_layers = len(types)
    if getattr(text, "layer_types", None):
        with contextlib.suppress(AttributeError):  # a property: they follow from a period
            text.layer_types = list(types)
        if list(text.layer_types) != types:
            raise CompileError(f"no model of this kind has the layers {', '.join(types)}")
    return config


@dataclass(frozen=True, slots=True)
class _Plan:
    """The shallow models to trace, and the points to trace them at."""

    base: list[str]
    missing: dict[str, int]
    """Layers of each type that the full model has beside those of `base`."""
    probes: tuple[Probe, Probe]
    check: Probe


def compile_passes(workload: Workload, model_config: Any, structure: Structure) -> CompiledPasses:
    """Compile the forward and backward passes of one structure of one model.

    Raises `CompileError` when sizes are not polynomial, when a layer does not insert its
    events in one place, or when the held-back trace contradicts the result; and what a trace of
    few layers raises, at depths and lengths that the model may not have.
    """
    plan = _plan(layer_types(model_config), structure)
    tracer = _Tracer(workload, model_config, structure)
    first, second = (tracer.trace(plan.base, probe) for probe in plan.probes)
    sizes = SizeTable(plan.probes)
    base = Layout(first, sizes.indices(first.timeline, second.timeline))
    works = WorkTable(plan.probes, first.timeline, second.timeline)
    deeper = {}
    for kind, layers in plan.missing.items():
        types = _deeper(plan.base, {kind: 1})
        traced = tracer.trace(types, plan.probes[0])
        twin = None
        if sizes.ambiguous or works.ambiguous:
            twin = tracer.trace(types, plan.probes[1]).timeline
        deeper[kind] = Layout(traced, sizes.lookup(traced.timeline, twin))
        works.add_layers(layers, traced.timeline, twin)
    moments = Moments(base, deeper, len(sizes.polynomials))
    deep = _check(moments, sizes, plan, tracer)
    return _assemble(plan, sizes, moments, works, second, deep)


def _plan(types: list[str], structure: Structure) -> _Plan:
    """Base: the first layer and the shortest end of the model with a layer of each type."""
    tail = 1
    while set(types[-tail:]) != set(types):
        tail += 1
    base = types if tail >= len(types) else [types[0], *types[-tail:]]
    counts, have = Counter(types), Counter(base)
    missing = {kind: counts[kind] - have[kind] for kind in counts if counts[kind] > have[kind]}
    return _Plan(base, missing, *structure.probes())


def _deeper(base: list[str], layers: Mapping[str, int]) -> list[str]:
    """The base with further layers, each beside those of its type, after the first layer.

    What layers of a type share, as position embeddings, is freed in the backward pass of the
    first of them: its place among the other types' layers must stay.
    """
    types = list(base)
    for kind, number in layers.items():
        place = types.index(kind, 1)
        types[place:place] = [kind] * number
    return types


@dataclass(frozen=True, slots=True)
class _Tracer:
    workload: Workload
    model_config: Any
    structure: Structure

    def trace(self, types: list[str], probe: Probe) -> PassTrace:
        return trace_passes(
            self.workload,
            with_layers(self.model_config, types),
            self.structure.configuration(probe),
            compute_capability=self.structure.compute_capability,
        )


def _assemble(
    plan: _Plan,
    sizes: SizeTable,
    moments: Moments,
    works: WorkTable,
    second: PassTrace,
    deep: Layout,
) -> CompiledPasses:
    counts, ends = moments.at_depth(plan.missing)
    workspace = sizes.workspace_index()
    if workspace >= 0:
        # Only in the first micro-step of all are there moments before cuBLAS has its workspaces.
        context = CATEGORIES.index(MemoryCategory.CONTEXT_AND_WORKSPACE)
        running = np.array(moments.segments) != LOADING
        counts[running, context, workspace] = ends[-1, context, workspace]
    terms = Terms.of(sizes.polynomials)
    kept = _possible_peaks(counts, np.array(moments.segments), terms, _grid(plan))
    first = [pair[0] for pair in works.pairs]
    tensors = [
        (number, works.fit(a, b))
        for number, (one, two) in enumerate(works.pairs)
        for a, b in zip(one.tensor_bytes, two.tensor_bytes, strict=True)
    ]
    shapes = [
        works.fit(a, b)
        for one, two in works.pairs
        for a, b in zip(_shape(one), _shape(two), strict=True)
    ]
    traces = moments.base.trace, second
    trainable, idle, frozen = (
        _parameters(plan, traces, moments.deeper, attrgetter(name))
        for name in ("trainable", "idle", "frozen")
    )
    return CompiledPasses(
        sizes=terms,
        counts=counts[kept],
        segments=np.array(moments.segments, dtype=np.int8)[kept],
        ends=ends,
        workspace=workspace,
        operators=Operators(
            names=tuple(work.name for work in first),
            kinds=tuple(work.kind for work in first),
            dtypes=tuple(work.dtype for work in first),
            flops=Terms.of([works.fit(one.flops, two.flops) for one, two in works.pairs]),
            tensor_bytes=Terms.of([polynomial for _, polynomial in tensors]),
            tensor_of=np.array([number for number, _ in tensors], dtype=np.int32),
            shapes=Terms.of(shapes),
            has_shape=np.array([work.shape is not None for work in first]),
        ),
        executions=works.executions,
        shallow=moments.base.events(),
        deep=deep.events(),
        depth_ratio=_depth_ratio(plan),
        trainable=_counted(trainable),
        trainable_kinds=tuple(kind for _, kind in trainable),
        idle=_counted(idle),
        frozen=_counted(frozen),
        remarks=deep.trace.remarks,
    )


def _shape(work: Work) -> tuple[int, int, int, int]:
    return work.shape or (1, 1, 1, 1)


def _counted(found: Counter[tuple[Polynomial, str]]) -> Parameters:
    sizes = Terms.of([polynomial for polynomial, _ in found])
    return Parameters(sizes, np.array(list(found.values()), dtype=np.int64))


_Parameters = Callable[[PassTrace], Iterable[tuple[int, str]]]


def _parameters(
    plan: _Plan,
    traces: tuple[PassTrace, PassTrace],
    deeper: Mapping[str, Layout],
    chosen: _Parameters,
) -> Counter[tuple[Polynomial, str]]:
    """The chosen parameters of the full model: how many of each size and kind."""
    first, second = traces
    by_size = {
        numel: fit((numel, other), plan.probes)
        for (numel, _), (other, _) in zip(chosen(first), chosen(second), strict=True)
    }

    def counted(traced: PassTrace) -> Counter[tuple[Polynomial, str]]:
        return Counter((by_size[numel], kind) for numel, kind in chosen(traced))

    ours = counted(first)
    total = Counter(ours)
    for kind, layers in plan.missing.items():
        theirs = counted(deeper[kind].trace)
        theirs.subtract(ours)
        for key, number in theirs.items():
            total[key] += layers * number
    return total


def _grid(plan: _Plan) -> Any:
    """Points (P, 4) at which moments are compared."""
    negatives = (2, 8, 32) if plan.check.n_negatives else (0,)
    sizes = (1, 2, 4, 8, 16, 32, 64), [2**n for n in range(6, 15)], (4, 32, 256, 1024)
    return np.array([*product(*sizes, negatives)], dtype=float)


_SLACK = 0.03
"""Part of what changes during a segment by which a moment may be below its peak on the grid."""


def _possible_peaks(counts: Any, segments: Any, terms: Terms, grid: Any) -> Any:
    """Indices of moments that are, or nearly are, the peak of a segment somewhere.

    Live memory is a sum of monomials, so a moment that is the peak between the points of a grid
    is nearly that at one of them. Moments with equal counts are kept once.
    """
    live = counts.sum(axis=1).astype(np.float64) @ terms.at(grid)
    kept = set()
    for number in range(len(ALL_SEGMENTS)):
        rows = np.nonzero(segments == number)[0]
        top, bottom = live[rows].max(axis=0), live[rows].min(axis=0)
        near = (live[rows] >= top - _SLACK * (top - bottom)).any(axis=1)
        flat = counts[rows[near]].reshape(int(near.sum()), -1)
        _, unique = np.unique(flat, axis=0, return_index=True)
        kept |= set(rows[near][unique].tolist())
    return np.array(sorted(kept))


_CHECK_LAYERS = 4
"""Additional layers of the held-back trace over the base, for the full model's number."""


def _check_layers(plan: _Plan) -> dict[str, int]:
    """Further layers of the held-back trace, of each type as the full model has them."""
    share = min(1.0, _CHECK_LAYERS / max(1, sum(plan.missing.values())))
    return {kind: max(1, round(share * layers)) for kind, layers in plan.missing.items()}


def _depth_ratio(plan: _Plan) -> float:
    return sum(plan.missing.values()) / max(1, sum(_check_layers(plan).values()))


def _recognised(
    timeline: Timeline, base: Layout, polynomials: list[Polynomial], probe: Probe
) -> list[int]:
    """The likely polynomial of every block of a model traced at another probe.

    Of those that the base model has for the same use, the one with the nearest value there:
    weights and activations often have equal sizes at a length that is a round number.
    """
    used = Counter(zip(base.categories.tolist(), base.polynomials.tolist(), strict=True))
    candidates: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
    for (category, number), times in used.items():
        candidates[category].append((float(polynomials[number](probe)), -times, number))
    found: dict[tuple[int, int], int] = {}
    for block in timeline.blocks:
        key = (category_index(block), block.size_bytes)
        if key not in found:
            if key[0] not in candidates:
                raise CompileError(f"a deeper model uses memory for {CATEGORIES[key[0]]}")
            near = min(candidates[key[0]], key=lambda item: (abs(item[0] - key[1]), item[1]))
            found[key] = near[2]
    return [found[category_index(block), block.size_bytes] for block in timeline.blocks]


def _check(moments: Moments, sizes: SizeTable, plan: _Plan, tracer: _Tracer) -> Layout:
    """Compare with a trace that is deeper and at another point than those compiled from.

    Returns that trace, its blocks matched with the sizes of the structure.
    """
    layers = _check_layers(plan)
    traced = tracer.trace(_deeper(plan.base, layers), plan.check)
    timeline = traced.timeline
    counts, _ = moments.at_depth(layers)
    points = np.array([plan.check.values])
    predicted = counts.sum(axis=1) @ Terms.of(sizes.polynomials).at(points.astype(float))
    signed = [sign * timeline.blocks[index].size_bytes for index, sign in timeline.events]
    live = np.cumsum(signed)
    layout = Layout(traced, _recognised(timeline, moments.base, sizes.polynomials, plan.check))
    for number, segment in enumerate(ALL_SEGMENTS):
        start, end = layout.spans[segment]
        measured = live[max(start - 1, 0) : end].max()
        ours = predicted[np.array(moments.segments) == number].max()
        if abs(ours - measured) > CHECK_TOLERANCE * measured:
            raise CompileError(
                f"{segment.phase} peak of micro-step {segment.micro_step}: compiled {ours:.0f}, "
                f"held-back trace {measured:.0f} bytes"
            )
    return layout
