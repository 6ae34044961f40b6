"""One timeline for all sizes of a training: its blocks' sizes are polynomials. Needs no torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuner.core.kinds import MemoryCategory, Phase
from tuner.cost.memory import CATEGORIES, Course, category_of
from tuner.cost.operators.timeline import Block, Mark, Timeline
from tuner.cost.polynomial import Terms
from tuner.cost.speed.roofline import StepWork
from tuner.cost.work_arrays import SEGMENTS, Operators, WorkArrays, optimizer_executions_of

_PHASES = tuple(Phase)
_LOGITS, _PAGED = 1, 2
_ALL_FLAGS = _LOGITS | _PAGED


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """B blocks: `labels` (B, 3) has the phase that made each, its category or -1, and flags.

    `numbers` (B,) says which of a timeline's sizes each has.
    """

    numbers: NDArray[np.int32]
    labels: NDArray[np.int8]

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Blocks:
        """The blocks of a trace."""
        labels = [
            (
                _PHASES.index(block.born_phase),
                -1 if block.category is None else CATEGORIES.index(block.category),
                _LOGITS * block.is_logits + _PAGED * block.paged,
            )
            for block in blocks
        ]
        numbers = np.array([block.number for block in blocks], dtype=np.int32)
        return cls(numbers, np.array(labels, dtype=np.int8).reshape(-1, 3))

    @classmethod
    def like(cls, models: Sequence[Blocks], sources: Sequence[tuple[int, int]]) -> Blocks:
        """Blocks that are like some of those of models: numbers of a model and of its block."""
        model, block = np.array(sources).T
        place = np.cumsum([0, *(len(each.numbers) for each in models)])[model] + block
        numbers, labels = (
            np.concatenate([getattr(each, name) for each in models])[place]
            for name in ("numbers", "labels")
        )
        return cls(numbers, labels)


def rows_of(labels: NDArray[np.int8]) -> NDArray[np.int64]:
    """The place in `CATEGORIES` of what blocks with `Blocks.labels` are for; -1 if managed."""
    phases, categories, flags = labels.T.astype(np.int64)
    rows: NDArray[np.int64] = _rows()[phases, categories + 1, flags]
    return rows


@functools.cache
def _rows() -> NDArray[np.int64]:
    """The row of each phase, category and flags."""
    rows = np.full((len(_PHASES), len(CATEGORIES) + 1, _ALL_FLAGS + 1), -1)
    kinds = itertools.product(_PHASES, (None, *CATEGORIES), range(_ALL_FLAGS + 1))
    for place, (phase, category, flags) in enumerate(kinds):
        if not flags & _PAGED:
            of = bool(flags & _LOGITS)
            block = Block(0, born_phase=phase, born_event=0, category=category, is_logits=of)
            rows.flat[place] = CATEGORIES.index(category_of(block))
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerSteps:
    """An optimizer over the parameters of one training, gradients given, and two of its steps.

    `events` (E, 2) of block and +1 or -1; the steps begin at `first` and `second`, before them it
    is built. `sizes_bytes` are the sizes that the numbers of `blocks` mean. The work is that of the
    second step.
    """

    events: NDArray[np.int32]
    first: int
    second: int
    blocks: Blocks
    sizes_bytes: NDArray[np.int64]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    flops: NDArray[np.int64]
    moved_bytes: NDArray[np.int64]
    times: NDArray[np.int64]

    @classmethod
    def of(cls, timeline: Timeline) -> OptimizerSteps:
        """The steps of a timeline that has labelled parameters and gradients."""
        given = (MemoryCategory.ADAPTERS, MemoryCategory.GRADIENTS)
        own = [n for n, block in enumerate(timeline.blocks) if block.category not in given]
        place = {block: number for number, block in enumerate(own)}
        events = [(place[block], sign) for block, sign in timeline.events if block in place]
        _, *starts = (mark.event for mark in timeline.marks)
        first, second = (
            sum(block in place for block, _ in timeline.events[:start]) for start in starts
        )
        blocks = [timeline.blocks[n] for n in own]
        times = optimizer_executions_of(timeline)
        ran = [timeline.works[work] for work in np.flatnonzero(times)]
        return cls(
            np.array(events, dtype=np.int32).reshape(-1, 2),
            first,
            second,
            Blocks.of([replace(block, number=n) for n, block in enumerate(blocks)]),
            np.array([block.size_bytes for block in blocks], dtype=np.int64),
            tuple(work.name for work in ran),
            tuple(work.kind for work in ran),
            tuple(work.dtype for work in ran),
            np.array([work.flops for work in ran], dtype=np.int64),
            np.array([work.bytes_moved for work in ran], dtype=np.int64),
            times[times > 0],
        )

    def require_consistent(self) -> None:
        """Raise ValueError unless the arrays belong together."""
        blocks, kernels = len(self.sizes_bytes), len(self.times)
        parts = (self.names, self.kinds, self.dtypes, self.flops, self.moved_bytes)
        fits = (
            _within(self.events[:, 0], blocks),
            self.blocks.labels.shape == (blocks, 3),
            0 <= self.first <= self.second <= len(self.events),
            *(len(part) == kernels for part in parts),
        )
        if not all(fits):
            raise ValueError("arrays of an optimizer that do not belong together")

    def update(self, step: int) -> NDArray[np.int32]:
        """The events of the first step, or of the second."""
        return self.events[self.second :] if step else self.events[self.first : self.second]

    @property
    def works(self) -> WorkArrays:
        """The kernels of the second step, at one point."""
        number = len(self.times)
        return WorkArrays(
            names=np.array(self.names, dtype=np.str_),
            kinds=np.array(self.kinds, dtype=np.str_),
            dtypes=np.array(self.dtypes, dtype=np.str_),
            flops=self.flops[:, None].astype(float),
            bytes_moved=self.moved_bytes[:, None].astype(float),
            shapes=np.ones((number, 4, 1)),
            has_shape=np.zeros(number, dtype=bool),
        )


class Span(NamedTuple):
    """The events `start` to `end` of a timeline: a phase of a step and of a micro-step."""

    start: int
    end: int
    phase: Phase
    step: int
    micro_step: int


@dataclass(frozen=True, slots=True, eq=False)
class SizedTimeline:
    """Two optimizer steps of a structure at full depth, without what its optimizer does.

    An evaluation may follow, whose batch is a variable of its own.

    `events` (E, 2) of block and +1 or -1; `marks` (M, 4) of event, phase, step and micro-step. The
    first step has one micro-step, the second two. `workspace` numbers the size of cuBLAS's
    workspaces, or is -1. `executions` (S, 2, W) as in `executions_of`.

    `trained` are the sizes and `kinds` the kinds of parameters that are trained, `order` (T,) the
    number of each in the optimizer's order. `counts` are two polynomials: trainable parameters,
    and all.
    """

    events: NDArray[np.int32]
    blocks: Blocks
    marks: NDArray[np.int32]
    sizes: Terms
    workspace: int
    operators: Operators
    executions: NDArray[np.int64]
    trained: Terms
    kinds: tuple[str, ...]
    order: NDArray[np.int32]
    counts: Terms
    remarks: tuple[str, ...]

    @classmethod
    def of(
        cls, events: Sequence[tuple[int, int]], marks: Sequence[Mark], **rest: Any
    ) -> SizedTimeline:
        """From the events and marks of a trace."""
        rows = [(m.event, _PHASES.index(m.phase), m.step, m.micro_step) for m in marks]
        return cls(
            events=np.array(events, dtype=np.int32), marks=np.array(rows, dtype=np.int32), **rest
        )

    def require_consistent(self) -> None:
        """Raise ValueError unless the arrays belong together."""
        blocks, sizes = len(self.blocks.numbers), len(self.sizes.coefficients)
        operators, trained = len(self.operators.kinds), len(self.kinds)
        index, sign = self.events.T
        fits = (
            _within(index, blocks),
            bool((np.abs(sign) == 1).all()),
            self.blocks.labels.shape == (blocks, 3),
            _within(self.blocks.labels[:, 0], len(_PHASES)),
            _within(self.blocks.labels[:, 1] + 1, len(CATEGORIES) + 1),
            _within(self.blocks.numbers, sizes),
            -1 <= self.workspace < sizes,
            _within(self.marks[:, 0], len(self.events) + 1),
            _within(self.marks[:, 1], len(_PHASES)),
            _within(self.order, trained),
            len(self.trained.coefficients) == trained,
            len(self.counts.coefficients) == 2,
            self.executions.shape == (len(SEGMENTS), 2, operators),
            self.operators.is_consistent(),
            *(terms.is_consistent() for terms in (self.sizes, self.trained, self.counts)),
        )
        if not all(fits):
            raise ValueError("arrays of a timeline that do not belong together")

    def parameters(self, point: Any) -> tuple[tuple[int, str], ...]:
        """Elements and kind of each parameter that is trained at a point (4,), in order."""
        numels = _whole(self.trained, point).tolist()
        return tuple((numels[row], self.kinds[row]) for row in self.order.tolist())

    def params(self, point: Any) -> tuple[int, int]:
        """Trainable and total parameters at a point (4,)."""
        trainable, total = _whole(self.counts, point).tolist()
        return trainable, total

    def work(self, point: Any, optimizer: OptimizerSteps) -> StepWork:
        """The work of the second step at a point (4,)."""
        points = np.array([point], dtype=float)
        return StepWork(
            passes=WorkArrays.of_operators(self.operators, points),
            executions=self.executions,
            optimizer=optimizer.works,
            optimizer_executions=optimizer.times,
            trained=len(self.order),
        )

    def at(
        self, point: Any, optimizer: OptimizerSteps, *, workspace_bytes: int, accumulates: bool
    ) -> Course:
        """The requests of a training of these sizes, with one or two micro-steps in a step."""
        own = _whole(self.sizes, point)
        if self.workspace >= 0:
            own[self.workspace] = workspace_bytes
        sizes = np.concatenate([own[self.blocks.numbers], optimizer.sizes_bytes])
        rows = rows_of(np.concatenate([self.blocks.labels, optimizer.blocks.labels]))
        parts, marks, at = [], [], 0
        offset = np.array([len(self.blocks.numbers), 0])
        for start, end, phase, step, micro_step in self.spans(accumulates=accumulates):
            is_update = phase is Phase.OPTIMIZER
            if phase is Phase.FORWARD and not step:
                parts.append(optimizer.events[: optimizer.first] + offset)
                at += optimizer.first
            marks.append((at, phase, step, micro_step))
            pieces = [self.events[start:end]]
            if is_update:
                pieces.insert(0, optimizer.update(step) + offset)
            parts += pieces
            at += sum(map(len, pieces))
        return _course(np.concatenate(parts), marks, sizes, rows)

    def spans(self, *, accumulates: bool) -> Iterator[Span]:
        """The phases in order; the second micro-step is left out where nothing accumulates."""
        ends = [*self.marks[1:, 0].tolist(), len(self.events)]
        for (start, number, step, micro_step), end in zip(self.marks.tolist(), ends, strict=True):
            phase = _PHASES[number]
            is_update = phase is Phase.OPTIMIZER
            if accumulates or step != 1 or micro_step != 1 or is_update:
                last = 1 if is_update and not accumulates else micro_step
                yield Span(start, end, phase, step, last)


def _course(
    events: NDArray[np.int64],
    marks: list[tuple[int, Phase, int, int]],
    sizes: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> Course:
    """These events, without frees of blocks that were never allocated."""
    was_born = np.zeros(len(sizes), dtype=bool)
    was_born[events[events[:, 1] > 0, 0]] = True
    kept = was_born[events[:, 0]]
    moved = np.concatenate([[0], np.cumsum(kept)])
    paged = rows < 0
    return Course(
        events=events[kept],
        marks=[Mark(int(moved[event]), phase, step, last) for event, phase, step, last in marks],
        sizes_bytes=np.where(paged, 0, sizes),
        rows=np.where(paged, 0, rows),
        paged_bytes=int(sizes[paged & was_born].sum()),
    )


def _within(numbers: NDArray[Any], limit: int) -> bool:
    """Check that all numbers can be indices of `limit` items."""
    return bool((numbers >= 0).all() and (numbers < limit).all())


def _whole(terms: Terms, point: Any) -> NDArray[np.int64]:
    values: NDArray[np.int64] = terms.at(np.array([point], dtype=float))[:, 0]
    return np.round(values).astype(np.int64)
