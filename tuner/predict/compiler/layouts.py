"""Traced models as counts of blocks: which sizes there are, and how many of each live when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tuner.core.records import MemoryCategory, Phase
from tuner.cost.compiled import CATEGORIES, SEGMENTS, Events, Segment
from tuner.cost.memory import category_of
from tuner.cost.operators.timeline import Block, Timeline, Work
from tuner.cost.polynomial import NotPolynomialError, Polynomial, Probe, fit
from tuner.cost.work_arrays import executions_of
from tuner.predict.compiler.alignment import align
from tuner.predict.tracing.trace import PassTrace

LOAD = Segment(Phase.LOAD, 0)
ALL_SEGMENTS = (*SEGMENTS, LOAD)
"""`SEGMENTS` with that of number `LOADING`."""


class CompileError(Exception):
    """The structure does not compile: the caller falls back to full traces."""


class SizeTable:
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
        for key in size_keys(first, second):
            if key not in self._numbers:
                self._numbers[key] = len(self.polynomials)
                self.polynomials.append(_fitted(key[:2], self._probes, "a size"))
            found.append(self._numbers[key])
        return found

    def lookup(self, first: Timeline, second: Timeline | None) -> list[int]:
        """The polynomial of every block of a deeper model, from its traces.

        The second may be missing where no two polynomials meet at the first probe.
        """
        if second is not None:
            keys: Iterable[tuple[int, ...]] = size_keys(first, second)
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
        """True if different polynomials have the same value at the first probe."""
        return len({(one, kind) for one, _, kind in self._numbers}) < len(self._numbers)

    def workspace_index(self) -> int:
        """Index of the cuBLAS workspace, whose size depends on the GPU; or -1."""
        return next((i for (_, _, workspace), i in self._numbers.items() if workspace), -1)


def _fitted(values: tuple[int, int], probes: tuple[Probe, Probe], noun: str) -> Polynomial:
    """The polynomial of a quantity with these values at the probes. Raises `CompileError`."""
    try:
        return fit(values, probes)
    except NotPolynomialError as error:
        raise CompileError(f"{noun} is not a polynomial: {error}") from error


def _is_workspace(block: Block) -> bool:
    return block.category is MemoryCategory.CONTEXT_AND_WORKSPACE


def size_keys(first: Timeline, second: Timeline) -> list[tuple[int, int, bool]]:
    """A key of the polynomial of each block of a model that was traced at both probes."""
    if first.events != second.events:
        raise CompileError("the sequence of allocations depends on batch, length or rank")
    return [
        (one.size_bytes, two.size_bytes, _is_workspace(one))
        for one, two in zip(first.blocks, second.blocks, strict=True)
    ]


class Layout:
    """One traced model as counts: how many blocks of each size are live at each event."""

    def __init__(self, traced: PassTrace, polynomial_of_block: list[int]) -> None:
        self.trace = traced
        self.polynomial_of_block = polynomial_of_block
        timeline = traced.timeline
        self.signs = np.array([sign for _, sign in timeline.events], dtype=np.int8)
        blocks = np.array([index for index, _ in timeline.events])
        self.polynomials = np.array(polynomial_of_block)[blocks]
        self.categories = np.array([category_index(b) for b in timeline.blocks])[blocks]
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
            spans=np.array([self.spans[segment] for segment in ALL_SEGMENTS], dtype=np.int64),
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


def category_index(block: Block) -> int:
    """The number of a block's category in `CATEGORIES`."""
    return CATEGORIES.index(category_of(block))


class Moments:
    """Live blocks at every moment of the base model, and what each further layer adds."""

    def __init__(self, base: Layout, deeper: Mapping[str, Layout], size: int) -> None:
        self.base = base
        self.deeper = deeper
        self._size = size
        positions: list[int] = []
        self.segments: list[int] = []
        for number, segment in enumerate(ALL_SEGMENTS):
            start, end = base.spans[segment]
            inside = [start - 1, *(e for e in range(start, end) if base.signs[e] > 0)]
            positions += inside
            self.segments += [number] * len(inside)
        last = (LOAD, Segment(Phase.BACKWARD, 0), Segment(Phase.BACKWARD, 1))
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
        """Contribution of one more layer of each kind at each position, by the two alignments."""
        found: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for kind, layout in self.deeper.items():
            for added, matched in zip(found, aligned(self.base, layout), strict=True):
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


def aligned(base: Layout, deeper: Layout) -> tuple[dict[int, int], dict[int, int]]:
    """Position in the deeper model for each position of the base model.

    In each segment the deeper model's events are the base model's with a few runs inserted
    (the layer itself; what is freed for it at the end of the pass). Raises `CompileError`
    where they are not. Among equal layers the inserted one may stand last or first: both are
    returned, because the peak may lie in the first of the layers or in the last.
    """
    late: dict[int, int] = {}
    early: dict[int, int] = {}
    for segment in ALL_SEGMENTS:
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


class WorkTable:
    """The distinct operators with polynomials for their work, and how often each runs."""

    def __init__(self, probes: tuple[Probe, Probe], first: Timeline, second: Timeline) -> None:
        self._probes = probes
        self.pairs = work_pairs(first, second)
        self._base = self._counted(first, self.pairs)
        self.executions = self._base.copy()
        """Executions (S, 2, W) of the model with all layers added so far."""

    @property
    def ambiguous(self) -> bool:
        """True if different operators do the same work at the first probe."""
        return len({one for one, _ in self.pairs}) < len(set(self.pairs))

    def add_layers(self, layers: int, first: Timeline, second: Timeline | None) -> None:
        """Count the work of further layers, given a model with one more.

        The second trace may be missing where nothing is ambiguous.
        """
        if second is not None:
            pairs = work_pairs(first, second)
        else:
            twins = dict(self.pairs)
            pairs = [(work, twins.get(work, work)) for work in first.works]
        self.executions += layers * (self._counted(first, pairs) - self._base)

    def _counted(self, timeline: Timeline, pairs: list[tuple[Work, Work]]) -> Any:
        numbers = {pair: number for number, pair in enumerate(self.pairs)}
        counts = np.zeros((len(SEGMENTS), 2, len(self.pairs)), dtype=np.int64)
        executions = executions_of(timeline)
        for work in np.flatnonzero(executions.any(axis=(0, 1))).tolist():
            number = numbers.get(pairs[work])
            if number is None:
                name = timeline.works[work].name
                raise CompileError(f"a deeper model runs a new kind of {name}")
            counts[:, :, number] += executions[:, :, work]
        return counts

    def fit(self, first: int, second: int) -> Polynomial:
        """The polynomial of a quantity of an operator."""
        return _fitted((first, second), self._probes, "the work of an operator")


def work_pairs(first: Timeline, second: Timeline) -> list[tuple[Work, Work]]:
    """Each operator of a model, as it is at the two probes."""
    if [work.name for work in first.works] != [work.name for work in second.works]:
        raise CompileError("the sequence of operators depends on batch, length or rank")
    return list(zip(first.works, second.works, strict=True))
