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
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from tuner.estimate.compiled import CATEGORIES, SEGMENTS, CompiledPasses, Segment
from tuner.estimate.memory import category_of
from tuner.estimate.polynomial import NotPolynomialError, Polynomial, Probe, Terms, fit
from tuner.estimate.recorder import Block, Timeline, Work
from tuner.estimate.structure import Structure
from tuner.estimate.trace import PassTrace, trace_passes
from tuner.records import MemoryCategory, Phase
from tuner.workloads.base import Workload

CHECK_TOLERANCE = 1e-6
"""Largest relative difference between compiled peaks and those of the held-back trace."""


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
    deeper = {}
    for kind in plan.missing:
        traced = tracer.trace([plan.base[0], kind, *plan.base[1:]], plan.probes[0])
        deeper[kind] = _Layout(traced, sizes.lookup(traced.timeline))
    moments = _Moments(base, deeper, len(sizes.polynomials))
    works = _WorkTable(plan.probes, base, second, deeper)
    compiled = _assemble(plan, sizes, moments, works, second)
    _check(moments, sizes, plan, tracer)
    return compiled


def _plan(types: list[str], structure: Structure) -> _Plan:
    """Base: the first layer and the shortest end of the model with a layer of each type."""
    tail = 1
    while set(types[-tail:]) != set(types):
        tail += 1
    base = types if tail >= len(types) else [types[0], *types[-tail:]]
    counts, have = Counter(types), Counter(base)
    missing = {kind: counts[kind] - have[kind] for kind in counts if counts[kind] > have[kind]}
    return _Plan(base, missing, *structure.probes())


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

    Blocks of different traces are matched by their size at the first probe, so two different
    polynomials must not meet there: the probes' primes see to it, and a clash is an error.
    """

    def __init__(self, probes: tuple[Probe, Probe]) -> None:
        self._probes = probes
        self._by_first: dict[tuple[int, bool], int] = {}
        self.polynomials: list[Polynomial] = []

    def indices(self, first: Timeline, second: Timeline) -> list[int]:
        """The polynomial of every block of the base model, from its two traces."""
        if first.events != second.events:
            raise CompileError("the sequence of allocations depends on batch, length or rank")
        found = []
        for one, two in zip(first.blocks, second.blocks, strict=True):
            polynomial = self._fit(one.size_bytes, two.size_bytes)
            key = (one.size_bytes, one.category is MemoryCategory.CONTEXT_AND_WORKSPACE)
            index = self._by_first.get(key)
            if index is None:
                index = self._by_first[key] = len(self.polynomials)
                self.polynomials.append(polynomial)
            elif self.polynomials[index] != polynomial:
                raise CompileError(f"two kinds of block have {one.size_bytes} bytes in the probe")
            found.append(index)
        return found

    def lookup(self, timeline: Timeline) -> list[int]:
        """The polynomial of every block of a deeper model at the first probe."""
        found = []
        for block in timeline.blocks:
            key = (block.size_bytes, block.category is MemoryCategory.CONTEXT_AND_WORKSPACE)
            if key not in self._by_first:
                raise CompileError(f"a deeper model has a new block of {block.size_bytes} bytes")
            found.append(self._by_first[key])
        return found

    def workspace_index(self) -> int:
        """Which polynomial is the cuBLAS workspace, whose size depends on the GPU; or -1."""
        return next((i for (_, workspace), i in self._by_first.items() if workspace), -1)

    def _fit(self, first: int, second: int) -> Polynomial:
        try:
            return fit((first, second), self._probes)
        except NotPolynomialError as error:
            raise CompileError(f"a size is not a polynomial: {error}") from error


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
        for number, segment in enumerate(SEGMENTS):
            start, end = base.spans[segment]
            inside = [start - 1, *(e for e in range(start, end) if base.signs[e] > 0)]
            positions += inside
            self.segments += [number] * len(inside)
        boundaries = [base.spans[SEGMENTS[0]][0] - 1]
        boundaries += [base.spans[Segment(Phase.BACKWARD, i)][1] - 1 for i in (0, 1)]
        self._rows = base.live_counts(size, positions + boundaries)
        self._added = {
            kind: layout.live_counts(size, _aligned(base, layout, positions, boundaries))
            - self._rows
            for kind, layout in deeper.items()
        }
        self._boundaries = len(boundaries)

    def at_depth(self, missing: Mapping[str, int]) -> tuple[Any, Any]:
        """Counts (K, C, U) of moments and (3, C, U) of boundaries with these further layers."""
        rows = self._rows.astype(np.int32)
        for kind, layers in missing.items():
            rows = rows + layers * self._added[kind]
        shaped = rows.reshape(len(rows), self._size, len(CATEGORIES)).transpose(0, 2, 1)
        return shaped[: -self._boundaries], shaped[-self._boundaries :]


def _aligned(
    base: _Layout, deeper: _Layout, positions: list[int], boundaries: list[int]
) -> list[int]:
    """Where the deeper model is at the moment when the base model is at each position.

    In each segment the deeper model's events are the base model's with a few runs inserted
    (the layer itself; what is freed for it at the end of the pass). Raises `CompileError`
    where they are not.
    """
    matched: dict[int, int] = {}
    for segment in SEGMENTS:
        start, end = base.spans[segment]
        deep_start, deep_end = deeper.spans[segment]
        places = _match_with_insertions(base.tokens[start:end], deeper.tokens[deep_start:deep_end])
        if places is None:
            raise CompileError(f"a layer rearranges the events of the {segment.phase} pass")
        # Before its first event a segment is where the previous one ended.
        matched.setdefault(start - 1, deep_start - 1)
        matched.update(zip(range(start, end), (deep_start + places).tolist(), strict=True))
        # All that was inserted at the end belongs to the last moment too.
        matched[end - 1] = deep_end - 1
    return [matched[position] for position in positions + boundaries]


_LOOK_AHEAD = 32
"""Events that must agree for a place after an insertion to be looked at."""


def _match_with_insertions(ours: Any, theirs: Any) -> Any:
    """Index in `theirs` of each element of `ours`, or None when it is no subsequence by runs.

    After each difference the insertion is skipped whose continuation agrees longest.
    """
    places = np.empty(len(ours), dtype=np.int64)
    done, shift = 0, 0
    while done < len(ours):
        run = _common_prefix(ours[done:], theirs[done + shift :])
        places[done : done + run] = np.arange(done, done + run) + shift
        done += run
        if done == len(ours):
            break
        rest, candidates = ours[done:], theirs[done + shift :]
        window = min(_LOOK_AHEAD, len(rest))
        if len(candidates) < window:
            return None
        views = np.lib.stride_tricks.sliding_window_view(candidates, window)
        starts = np.nonzero((views == rest[:window]).all(axis=1))[0]
        starts = starts[: len(candidates)]
        if not len(starts):
            return None
        runs = [_common_prefix(rest, candidates[start:]) for start in starts]
        shift += int(starts[int(np.argmax(runs))])
    return places


def _common_prefix(ours: Any, theirs: Any) -> int:
    shared = min(len(ours), len(theirs))
    differs = np.nonzero(ours[:shared] != theirs[:shared])[0]
    return int(differs[0]) if len(differs) else shared


class _WorkTable:
    """The distinct operators with polynomials for their work, and how often each runs."""

    def __init__(
        self,
        probes: tuple[Probe, Probe],
        base: _Layout,
        second: PassTrace,
        deeper: Mapping[str, _Layout],
    ) -> None:
        self._probes = probes
        ours, theirs = base.trace.timeline.works, second.timeline.works
        if [w.name for w in ours] != [w.name for w in theirs]:
            raise CompileError("the sequence of operators depends on batch, length or rank")
        self.pairs = list(zip(ours, theirs, strict=True))
        self._index = {work: number for number, work in enumerate(ours)}
        self._base = self._executions(base.trace.timeline)
        self._added = {
            kind: self._executions(layout.trace.timeline) - self._base
            for kind, layout in deeper.items()
        }

    def executions(self, missing: Mapping[str, int]) -> Any:
        """Executions (S, 2, W) with these further layers."""
        total = self._base.copy()
        for kind, layers in missing.items():
            total += layers * self._added[kind]
        return total

    def fit(self, first: int, second: int) -> Polynomial:
        """The polynomial of a quantity of an operator."""
        try:
            return fit((first, second), self._probes)
        except NotPolynomialError as error:
            raise CompileError(f"the work of an operator is not a polynomial: {error}") from error

    def _executions(self, timeline: Timeline) -> Any:
        counts = np.zeros((len(SEGMENTS), 2, len(self.pairs)), dtype=np.int64)
        for op in timeline.ops:
            mark = timeline.marks[op.mark]
            segment = Segment(mark.phase, mark.micro_step)
            if segment in SEGMENTS and mark.step == 1:
                number = self._index.get(timeline.works[op.work])
                if number is None:
                    name = timeline.works[op.work].name
                    raise CompileError(f"a deeper model runs a new kind of {name}")
                counts[SEGMENTS.index(segment), int(op.recompute), number] += 1
        return counts


def _assemble(
    plan: _Plan, sizes: _SizeTable, moments: _Moments, works: _WorkTable, second: PassTrace
) -> CompiledPasses:
    counts, ends = moments.at_depth(plan.missing)
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
    base = moments.base.trace
    groups = _trainable(plan, base, second, moments.deeper)
    return CompiledPasses(
        sizes=terms,
        counts=counts[kept],
        segments=np.array(moments.segments, dtype=np.int8)[kept],
        ends=ends,
        workspace=sizes.workspace_index(),
        kinds=tuple(work.kind for work in first),
        dtypes=tuple(work.dtype for work in first),
        flops=Terms.of([works.fit(one.flops, two.flops) for one, two in works.pairs]),
        tensor_bytes=Terms.of([polynomial for _, polynomial in tensors]),
        tensor_of=np.array([number for number, _ in tensors], dtype=np.int32),
        shapes=Terms.of(shapes),
        has_shape=np.array([work.shape is not None for work in first]),
        executions=works.executions(plan.missing),
        shallow_events=np.array(base.timeline.events, dtype=np.int64),
        shallow_blocks=np.array(moments.base.polynomial_of_block, dtype=np.int32),
        trainable=Terms.of([polynomial for polynomial, _ in groups]),
        trainable_counts=np.array(list(groups.values()), dtype=np.int64),
        trainable_dtypes=tuple(dtype for _, dtype in groups),
        frozen_params=_frozen_params(plan, base, moments.deeper),
    )


def _shape(work: Work) -> tuple[int, int, int, int]:
    return work.shape or (1, 1, 1, 1)


def _trainable(
    plan: _Plan, base: PassTrace, second: PassTrace, deeper: Mapping[str, _Layout]
) -> Counter[tuple[Polynomial, str]]:
    """Trainable parameters of the full model: how many of each size and dtype."""
    by_size = {
        numel: fit((numel, other), plan.probes)
        for (numel, _), (other, _) in zip(base.trainable, second.trainable, strict=True)
    }

    def counted(traced: PassTrace) -> Counter[tuple[Polynomial, str]]:
        names = ((by_size[n], str(dtype).removeprefix("torch.")) for n, dtype in traced.trainable)
        return Counter(names)

    ours = counted(base)
    total = Counter(ours)
    for kind, layers in plan.missing.items():
        theirs = counted(deeper[kind].trace)
        theirs.subtract(ours)
        for key, number in theirs.items():
            total[key] += layers * number
    return total


def _frozen_params(plan: _Plan, base: PassTrace, deeper: Mapping[str, _Layout]) -> int:
    def frozen(traced: PassTrace) -> int:
        return traced.total_params - sum(numel for numel, _ in traced.trainable)

    added = (
        layers * (frozen(deeper[k].trace) - frozen(base)) for k, layers in plan.missing.items()
    )
    return frozen(base) + sum(added)


def _possible_peaks(counts: Any, segments: Any, terms: Terms) -> Any:
    """Indices of moments that are, or nearly are, the peak of a segment somewhere.

    Live memory is a sum of monomials with positive coefficients, so a grid over the corners
    and the middle of the range of (b, s, r), with a tenth of slack, finds every moment that
    can win. Moments with equal counts are kept once.
    """
    grid = np.array(list(product((1, 4, 64), (64, 1024, 16384), (4, 64, 1024))), dtype=float)
    live = counts.sum(axis=1).astype(np.float64) @ terms.at(grid)
    kept = set()
    for number in range(len(SEGMENTS)):
        rows = np.nonzero(segments == number)[0]
        near = (live[rows] >= 0.9 * live[rows].max(axis=0)).any(axis=1)
        flat = counts[rows[near]].reshape(int(near.sum()), -1)
        _, unique = np.unique(flat, axis=0, return_index=True)
        kept |= set(rows[near][unique].tolist())
    return np.array(sorted(kept))


def _check(moments: _Moments, sizes: _SizeTable, plan: _Plan, tracer: _Tracer) -> None:
    """Compare with a trace that is deeper and at another point than those compiled from."""
    layers = {kind: min(2, missing) for kind, missing in plan.missing.items()}
    extra = [kind for kind, number in layers.items() for _ in range(number)]
    traced = tracer.trace([plan.base[0], *extra, *plan.base[1:]], plan.check)
    timeline = traced.timeline
    counts, _ = moments.at_depth(layers)
    points = np.array([[plan.check.micro_batch, plan.check.max_length, plan.check.lora_rank]])
    predicted = counts.sum(axis=1) @ Terms.of(sizes.polynomials).at(points.astype(float))
    signed = [sign * timeline.blocks[index].size_bytes for index, sign in timeline.events]
    live = np.cumsum(signed)
    layout = _Layout(traced, [0] * len(timeline.blocks))
    for number, segment in enumerate(SEGMENTS):
        start, end = layout.spans[segment]
        measured = live[start - 1 : end].max()
        ours = predicted[np.array(moments.segments) == number].max()
        if abs(ours - measured) > CHECK_TOLERANCE * measured:
            raise CompileError(
                f"{segment.phase} peak of micro-step {segment.micro_step}: compiled {ours:.0f}, "
                f"held-back trace {measured:.0f} bytes"
            )
