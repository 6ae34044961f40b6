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

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from tuner.estimate.alignment import align
from tuner.estimate.compiled import CATEGORIES, LOADING, SEGMENTS, CompiledPasses, Events, Segment
from tuner.estimate.memory import category_of
from tuner.estimate.polynomial import NotPolynomialError, Polynomial, Probe, Terms, fit
from tuner.estimate.recorder import Block, Timeline, Work
from tuner.estimate.structure import Structure
from tuner.estimate.trace import PassTrace, trace_passes
from tuner.records import MemoryCategory, Phase
from tuner.workloads.base import Workload

CHECK_TOLERANCE = 1e-6
"""Largest relative difference between compiled peaks and those of the held-back trace."""


_LOAD = Segment(Phase.LOAD, 0)
_ALL_SEGMENTS = (*SEGMENTS, _LOAD)
"""`SEGMENTS` with that of number `LOADING`."""


class CompileError(Exception):
    """The structure does not compile: the caller falls back to full traces."""


def layer_types(model_config: Any) -> list[str]:
    """The kind of each layer in order; one kind for models that do not tell."""
    text = model_config.get_text_config()
    types = getattr(text, "layer_types", None)
    return list(types) if types else ["layer"] * text.num_hidden_layers


def with_layers(model_config: Any, types: list[str]) -> Any:
    """A copy of the configuration with these layers."""
    config = copy.deepcopy(model_config)
    text = config.get_text_config()
    text.num_hidden_layers = len(types)
    if getattr(text, "layer_types", None):
        text.layer_types = list(types)
    return config


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which shallow models are traced, and at which points."""

    base: list[str]
    missing: dict[str, int]
    """Layers of each type that the full model has beside those of `base`."""
    probes: tuple[Probe, Probe]
    check: Probe


def compile_passes(workload: Workload, model_config: Any, structure: Structure) -> CompiledPasses:
    """Compile the forward and backward passes of one structure of one model.

    Raises `CompileError` when sizes are not polynomial, when a layer does not insert its
    events in one place, or when the held-back trace contradicts the result.
    """
    plan = _plan(layer_types(model_config), structure)
    tracer = _Tracer(workload, model_config, structure)
    first, second = (tracer.trace(plan.base, probe) for probe in plan.probes)
    sizes = _SizeTable(plan.probes)
    base = _Layout(first, sizes.indices(first.timeline, second.timeline))
    works = _WorkTable(plan.probes, first.timeline, second.timeline)
    deeper = {}
    for kind, layers in plan.missing.items():
        types = _deeper(plan.base, {kind: 1})
        traced = tracer.trace(types, plan.probes[0])
        twin = None
        if sizes.ambiguous or works.ambiguous:
            twin = tracer.trace(types, plan.probes[1]).timeline
        deeper[kind] = _Layout(traced, sizes.lookup(traced.timeline, twin))
        works.add_layers(layers, traced.timeline, twin)
    moments = _Moments(base, deeper, len(sizes.polynomials))
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


class _SizeTable:
    """The distinct block sizes of a structure, each with its polynomial.

    A block's sizes at the two probes identify its polynomial.
    """

    def __init__(self, probes: tuple[Probe, Probe]) -> None:
        self._probes = probes
        self._numbers: dict[tuple[int, int, bool], int] = {}
        self.polynomials: list[Polynomial] = []

    def indices(self, first: Timeline, second: Timeline) -> list[int]:
        """The polynomial of every block of the base model, from its two traces."""
        found = []
        for key in _size_keys(first, second):
            if key not in self._numbers:
                self._numbers[key] = len(self.polynomials)
                self.polynomials.append(self._fit(*key[:2]))
            found.append(self._numbers[key])
        return found

    def lookup(self, first: Timeline, second: Timeline | None) -> list[int]:
        """The polynomial of every block of a deeper model, from its traces.

        The second may be missing where no two polynomials meet at the first probe.
        """
        if second is not None:
            keys: Iterable[tuple[int, ...]] = _size_keys(first, second)
            numbers: Mapping[tuple[int, ...], int] = self._numbers  # type: ignore[assignment]
        else:
            keys = ((b.size_bytes, _is_workspace(b)) for b in first.blocks)
            numbers = {(one, kind): n for (one, _, kind), n in self._numbers.items()}
        found = []
        for key in keys:
            if key not in numbers:
                raise CompileError(f"a deeper model has a new block of {key[0]} bytes")
            found.append(numbers[key])
        return found

    @property
    def ambiguous(self) -> bool:
        """Whether different polynomials have the same value at the first probe."""
        return len({(one, kind) for one, _, kind in self._numbers}) < len(self._numbers)

    def workspace_index(self) -> int:
        """Which polynomial is the cuBLAS workspace, whose size depends on the GPU; or -1."""
        return next((i for (_, _, workspace), i in self._numbers.items() if workspace), -1)

    def _fit(self, first: int, second: int) -> Polynomial:
        try:
            return fit((first, second), self._probes)
        except NotPolynomialError as error:
            raise CompileError(f"a size is not a polynomial: {error}") from error


def _is_workspace(block: Block) -> bool:
    return block.category is MemoryCategory.CONTEXT_AND_WORKSPACE


def _size_keys(first: Timeline, second: Timeline) -> list[tuple[int, int, bool]]:
    """What identifies the polynomial of each block of a model that was traced at both probes."""
    if first.events != second.events:
        raise CompileError("the sequence of allocations depends on batch, length or rank")
    return [
        (one.size_bytes, two.size_bytes, _is_workspace(one))
        for one, two in zip(first.blocks, second.blocks, strict=True)
    ]


class _Layout:
    """One traced model as counts: how many blocks of each size are live at each event."""

    def __init__(self, traced: PassTrace, polynomial_of_block: list[int]) -> None:
        self.trace = traced
        self.polynomial_of_block = polynomial_of_block
        timeline = traced.timeline
        self.signs = np.array([sign for _, sign in timeline.events], dtype=np.int8)
        blocks = np.array([index for index, _ in timeline.events])
        self.polynomials = np.array(polynomial_of_block)[blocks]
        self.categories = np.array([_category_index(b) for b in timeline.blocks])[blocks]
        self.tokens = self.polynomials * 2 + (self.signs > 0)
        ends = [*(mark.event for mark in timeline.marks[1:]), len(timeline.events)]
        self.spans = {
            Segment(mark.phase, mark.micro_step): (mark.event, end)
            for mark, end in zip(timeline.marks, ends, strict=True)
        }

    def events(self) -> Events:
        """The events as arrays."""
        return Events(
            events=np.array(self.trace.timeline.events, dtype=np.int64),
            sizes=np.array(self.polynomial_of_block, dtype=np.int32),
            spans=np.array([self.spans[segment] for segment in _ALL_SEGMENTS], dtype=np.int64),
        )

    def live_counts(self, size: int, positions: Any) -> Any:
        """Counts of shape (positions, size * categories) after the event at each position."""
        width = size * len(CATEGORIES)
        columns = self.polynomials * len(CATEGORIES) + self.categories
        rows = np.zeros((len(positions), width), dtype=np.int32)
        running = np.zeros(width, dtype=np.int32)
        wanted = defaultdict(list)
        for row, position in enumerate(positions):
            wanted[int(position)].append(row)
        for event, (column, sign) in enumerate(zip(columns, self.signs, strict=True)):
            running[column] += sign
            for row in wanted.get(event, ()):
                rows[row] = running
        return rows


def _category_index(block: Block) -> int:
    return CATEGORIES.index(category_of(block))


class _Moments:
    """Live blocks at every moment of the base model, and what each further layer adds."""

    def __init__(self, base: _Layout, deeper: Mapping[str, _Layout], size: int) -> None:
        self.base = base
        self.deeper = deeper
        self._size = size
        positions: list[int] = []
        self.segments: list[int] = []
        for number, segment in enumerate(_ALL_SEGMENTS):
            start, end = base.spans[segment]
            inside = [start - 1, *(e for e in range(start, end) if base.signs[e] > 0)]
            positions += inside
            self.segments += [number] * len(inside)
        last = (_LOAD, Segment(Phase.BACKWARD, 0), Segment(Phase.BACKWARD, 1))
        boundaries = [base.spans[segment][1] - 1 for segment in last]
        self._rows = base.live_counts(size, positions + boundaries)
        late, early = self._added_by_layers(positions, boundaries)
        # Moments inside of repeated layers count twice: in the first of them and in the last.
        differ = np.zeros(len(positions), dtype=bool)
        for kind in deeper:
            differ |= (late[kind] != early[kind]).any(axis=1)[: len(positions)]
        again = np.nonzero(differ)[0]
        self._rows = np.concatenate([self._rows[again], self._rows])
        self._added = {kind: np.concatenate([early[kind][again], late[kind]]) for kind in deeper}
        self.segments = [self.segments[row] for row in again] + self.segments
        self._boundaries = len(boundaries)

    def _added_by_layers(
        self, positions: list[int], boundaries: list[int]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What one more layer of each kind adds at each position, by the two alignments."""
        found: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for kind, layout in self.deeper.items():
            for added, matched in zip(found, _aligned(self.base, layout), strict=True):
                places = [matched[position] for position in positions + boundaries]
                added[kind] = layout.live_counts(self._size, places) - self._rows
        return found

    def at_depth(self, missing: Mapping[str, int]) -> tuple[Any, Any]:
        """Counts (K, C, U) of moments and (3, C, U) of boundaries with these further layers."""
        rows = self._rows.astype(np.int32)
        for kind, layers in missing.items():
            rows = rows + layers * self._added[kind]
        shaped = rows.reshape(len(rows), self._size, len(CATEGORIES)).transpose(0, 2, 1)
        return shaped[: -self._boundaries], shaped[-self._boundaries :]


def _aligned(base: _Layout, deeper: _Layout) -> tuple[dict[int, int], dict[int, int]]:
    """Where the deeper model is at the moment when the base model is at each position.

    In each segment the deeper model's events are the base model's with a few runs inserted
    (the layer itself; what is freed for it at the end of the pass). Raises `CompileError`
    where they are not. Among equal layers the inserted one may stand last or first: both are
    returned, because the peak may lie in the first of the layers or in the last.
    """
    late: dict[int, int] = {}
    early: dict[int, int] = {}
    for segment in _ALL_SEGMENTS:
        start, end = base.spans[segment]
        deep_start, deep_end = deeper.spans[segment]
        alignment = align(base.tokens[start:end], deeper.tokens[deep_start:deep_end])
        if alignment is None:
            raise CompileError(f"a layer rearranges the events of the {segment.phase} pass")
        for matched, places in ((late, alignment.late), (early, alignment.early)):
            # Before its first event a segment is where the previous one ended.
            matched.setdefault(start - 1, deep_start - 1)
            matched.update(zip(range(start, end), (deep_start + places).tolist(), strict=True))
            # All that was inserted at the end belongs to the last moment too.
            matched[end - 1] = deep_end - 1
    return late, early


class _WorkTable:
    """The distinct operators with polynomials for their work, and how often each runs."""

    def __init__(self, probes: tuple[Probe, Probe], first: Timeline, second: Timeline) -> None:
        self._probes = probes
        self.pairs = _work_pairs(first, second)
        self._base = self._counted(first, self.pairs)
        self.executions = self._base.copy()
        """Executions (S, 2, W) of the model with all layers added so far."""

    @property
    def ambiguous(self) -> bool:
        """Whether different operators do the same work at the first probe."""
        return len({one for one, _ in self.pairs}) < len(set(self.pairs))

    def add_layers(self, layers: int, first: Timeline, second: Timeline | None) -> None:
        """Count the work of so many further layers, given a model with one more.

        The second trace may be missing where nothing is ambiguous.
        """
        if second is not None:
            pairs = _work_pairs(first, second)
        else:
            twins = dict(self.pairs)
            pairs = [(work, twins.get(work, work)) for work in first.works]
        self.executions += layers * (self._counted(first, pairs) - self._base)

    def _counted(self, timeline: Timeline, pairs: list[tuple[Work, Work]]) -> Any:
        numbers = {pair: number for number, pair in enumerate(self.pairs)}
        counts = np.zeros((len(SEGMENTS), 2, len(self.pairs)), dtype=np.int64)
        for op in timeline.ops:
            mark = timeline.marks[op.mark]
            segment = Segment(mark.phase, mark.micro_step)
            if segment in SEGMENTS and mark.step == 1:
                number = numbers.get(pairs[op.work])
                if number is None:
                    name = timeline.works[op.work].name
                    raise CompileError(f"a deeper model runs a new kind of {name}")
                counts[SEGMENTS.index(segment), int(op.recompute), number] += 1
        return counts

    def fit(self, first: int, second: int) -> Polynomial:
        """The polynomial of a quantity of an operator."""
        try:
            return fit((first, second), self._probes)
        except NotPolynomialError as error:
            raise CompileError(f"the work of an operator is not a polynomial: {error}") from error


def _work_pairs(first: Timeline, second: Timeline) -> list[tuple[Work, Work]]:
    """Each operator of a model, as it is at the two probes."""
    if [work.name for work in first.works] != [work.name for work in second.works]:
        raise CompileError("the sequence of operators depends on batch, length or rank")
    return list(zip(first.works, second.works, strict=True))


def _assemble(
    plan: _Plan,
    sizes: _SizeTable,
    moments: _Moments,
    works: _WorkTable,
    second: PassTrace,
    deep: _Layout,
) -> CompiledPasses:
    counts, ends = moments.at_depth(plan.missing)
    workspace = sizes.workspace_index()
    if workspace >= 0:
        # Only in the first micro-step of all are there moments before cuBLAS has its workspaces.
        context = CATEGORIES.index(MemoryCategory.CONTEXT_AND_WORKSPACE)
        running = np.array(moments.segments) != LOADING
        counts[running, context, workspace] = ends[-1, context, workspace]
    terms = Terms.of(sizes.polynomials)
    kept = _possible_peaks(counts, np.array(moments.segments), terms)
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
    groups = _parameters(plan, traces, moments.deeper, lambda traced: traced.trainable)
    frozen = _parameters(plan, traces, moments.deeper, lambda traced: traced.frozen)
    return CompiledPasses(
        sizes=terms,
        counts=counts[kept],
        segments=np.array(moments.segments, dtype=np.int8)[kept],
        ends=ends,
        workspace=workspace,
        kinds=tuple(work.kind for work in first),
        dtypes=tuple(work.dtype for work in first),
        flops=Terms.of([works.fit(one.flops, two.flops) for one, two in works.pairs]),
        tensor_bytes=Terms.of([polynomial for _, polynomial in tensors]),
        tensor_of=np.array([number for number, _ in tensors], dtype=np.int32),
        shapes=Terms.of(shapes),
        has_shape=np.array([work.shape is not None for work in first]),
        executions=works.executions,
        shallow=moments.base.events(),
        deep=deep.events(),
        depth_ratio=_depth_ratio(plan),
        trainable=Terms.of([polynomial for polynomial, _ in groups]),
        trainable_counts=np.array(list(groups.values()), dtype=np.int64),
        trainable_dtypes=tuple(dtype for _, dtype in groups),
        frozen=Terms.of([polynomial for polynomial, _ in frozen]),
        frozen_counts=np.array(list(frozen.values()), dtype=np.int64),
    )


def _shape(work: Work) -> tuple[int, int, int, int]:
    return work.shape or (1, 1, 1, 1)


_Parameters = Callable[[PassTrace], Iterable[tuple[int, torch.dtype]]]


def _parameters(
    plan: _Plan,
    traces: tuple[PassTrace, PassTrace],
    deeper: Mapping[str, _Layout],
    chosen: _Parameters,
) -> Counter[tuple[Polynomial, str]]:
    """The chosen parameters of the full model: how many of each size and dtype."""
    first, second = traces
    by_size = {
        numel: fit((numel, other), plan.probes)
        for (numel, _), (other, _) in zip(chosen(first), chosen(second), strict=True)
    }

    def counted(traced: PassTrace) -> Counter[tuple[Polynomial, str]]:
        names = ((by_size[n], str(dtype).removeprefix("torch.")) for n, dtype in chosen(traced))
        return Counter(names)

    ours = counted(first)
    total = Counter(ours)
    for kind, layers in plan.missing.items():
        theirs = counted(deeper[kind].trace)
        theirs.subtract(ours)
        for key, number in theirs.items():
            total[key] += layers * number
    return total


_GRID = tuple(product((1, 2, 4, 8, 16, 32, 64), [2**n for n in range(6, 15)], (4, 32, 256, 1024)))
"""Points (b, s, r) at which moments are compared."""

_SLACK = 0.03
"""Part of what changes during a segment by which a moment may be below its peak on the grid."""


def _possible_peaks(counts: Any, segments: Any, terms: Terms) -> Any:
    """Indices of moments that are, or nearly are, the peak of a segment somewhere.

    Live memory is a sum of monomials, so a moment that is the peak between the points of a grid
    is nearly that at one of them. Moments with equal counts are kept once.
    """
    live = counts.sum(axis=1).astype(np.float64) @ terms.at(np.array(_GRID, dtype=float))
    kept = set()
    for number in range(len(_ALL_SEGMENTS)):
        rows = np.nonzero(segments == number)[0]
        top, bottom = live[rows].max(axis=0), live[rows].min(axis=0)
        near = (live[rows] >= top - _SLACK * (top - bottom)).any(axis=1)
        flat = counts[rows[near]].reshape(int(near.sum()), -1)
        _, unique = np.unique(flat, axis=0, return_index=True)
        kept |= set(rows[near][unique].tolist())
    return np.array(sorted(kept))


_CHECK_LAYERS = 4
"""Layers that the held-back trace has more than the base, where the full model has so many."""


def _check_layers(plan: _Plan) -> dict[str, int]:
    """Further layers of the held-back trace, of each type as the full model has them."""
    share = min(1.0, _CHECK_LAYERS / max(1, sum(plan.missing.values())))
    return {kind: max(1, round(share * layers)) for kind, layers in plan.missing.items()}


def _depth_ratio(plan: _Plan) -> float:
    return sum(plan.missing.values()) / max(1, sum(_check_layers(plan).values()))


def _recognised(
    timeline: Timeline, base: _Layout, polynomials: list[Polynomial], probe: Probe
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
        key = (_category_index(block), block.size_bytes)
        if key not in found:
            if key[0] not in candidates:
                raise CompileError(f"a deeper model uses memory for {CATEGORIES[key[0]]}")
            near = min(candidates[key[0]], key=lambda item: (abs(item[0] - key[1]), item[1]))
            found[key] = near[2]
    return [found[_category_index(block), block.size_bytes] for block in timeline.blocks]


def _check(moments: _Moments, sizes: _SizeTable, plan: _Plan, tracer: _Tracer) -> _Layout:
    """Compare with a trace that is deeper and at another point than those compiled from.

    Returns that trace, its blocks matched with the sizes of the structure.
    """
    layers = _check_layers(plan)
    traced = tracer.trace(_deeper(plan.base, layers), plan.check)
    timeline = traced.timeline
    counts, _ = moments.at_depth(layers)
    points = np.array([[plan.check.micro_batch, plan.check.max_length, plan.check.lora_rank]])
    predicted = counts.sum(axis=1) @ Terms.of(sizes.polynomials).at(points.astype(float))
    signed = [sign * timeline.blocks[index].size_bytes for index, sign in timeline.events]
    live = np.cumsum(signed)
    layout = _Layout(traced, _recognised(timeline, moments.base, sizes.polynomials, plan.check))
    for number, segment in enumerate(_ALL_SEGMENTS):
        start, end = layout.spans[segment]
        measured = live[max(start - 1, 0) : end].max()
        ours = predicted[np.array(moments.segments) == number].max()
        if abs(ours - measured) > CHECK_TOLERANCE * measured:
            raise CompileError(
                f"{segment.phase} peak of micro-step {segment.micro_step}: compiled {ours:.0f}, "
                f"held-back trace {measured:.0f} bytes"
            )
    return layout
