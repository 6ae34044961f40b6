"""From the course of a training to peak memory on one GPU, by use and by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.core.records import Memory, MemoryCategory, Phase
from tuner.cost.allocator import MIN_BLOCK_BYTES, AllocatorSettings, Replay, replay
from tuner.cost.operators.timeline import Block, Mark, Timeline

CATEGORIES = tuple(MemoryCategory)

_HOLDS_LOGITS = (None, MemoryCategory.ACTIVATIONS)
"""Categories that give way to LOGITS_AND_LOSS where a tensor has the vocabulary's width."""

_OTHERS = (Phase.EVALUATION, Phase.GENERATE)
"""Phases that are not in every training."""


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """The requests of a training to one device's allocator, in their order.

    `events` (E, 2) of block and +1 or -1. Of B blocks: `sizes_bytes` (B,), 0 for managed memory,
    of which there are `paged_bytes`; `rows` (B,), the place in `CATEGORIES` of what each is for;
    `streams`, or nothing where all are of one. `collectives` are exchanges, as of a `Timeline`.
    """

    events: NDArray[np.int64]
    marks: Sequence[Mark]
    sizes_bytes: NDArray[np.int64]
    rows: NDArray[np.int64]
    streams: Sequence[int] = ()
    paged_bytes: int = 0
    collectives: Sequence[tuple[str, int, int]] = ()

    @classmethod
    def of(cls, timeline: Timeline) -> Course:
        """The requests of a trace."""
        blocks = timeline.blocks
        sizes = [0 if block.paged else block.size_bytes for block in blocks]
        return cls(
            np.array(timeline.events, dtype=np.int64).reshape(-1, 2),
            timeline.marks,
            np.array(sizes, dtype=np.int64),
            np.array([CATEGORIES.index(category_of(b)) for b in blocks], dtype=np.int64),
            streams=[block.stream for block in blocks],
            paged_bytes=sum(block.size_bytes for block in blocks if block.paged),
            collectives=timeline.collectives,
        )

    @property
    def added_bytes(self) -> NDArray[np.int64]:
        """Bytes, as rounded, that each event adds: (E,)."""
        block, sign = self.events.T
        rounded = -(-self.sizes_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        added: NDArray[np.int64] = rounded[block] * sign
        return added


def memory_history(
    course: Course, *, settings: AllocatorSettings | None = None, short: bool = False
) -> Replay:
    """Memory after each event, by the allocator's rules; see `peak_memory`."""
    evaluation = (m.event for m in course.marks if short and m.phase is Phase.EVALUATION)
    return replay(
        zip(*course.events.T.tolist(), strict=True),
        course.sizes_bytes.tolist(),
        streams=course.streams,
        settings=settings,
        release_at=next(evaluation, None),
        keep_history=True,
    )


def peak_memory(
    course: Course,
    *,
    context_bytes: int,
    settings: AllocatorSettings | None = None,
    short: bool = False,
) -> Memory:
    """Peak memory of the traced steps on a GPU.

    Replaying all requests through the allocator's rules gives what `max_memory_allocated` and
    `max_memory_reserved` would say: whole blocks, with the rests in them that were not worth
    splitting off. Device memory adds `context_bytes`, which CUDA holds outside of both. Where
    memory is `short`, the allocator gives back what the steps left free before an evaluation.
    """
    history = memory_history(course, settings=settings, short=short)
    live, reserved = np.array(history.allocated_bytes), history.peak_reserved_bytes
    peak_at = int(live.argmax())
    phase_peaks = _phase_peaks(live, course.marks)
    before = slice(peak_at + 1)
    rows = course.rows[course.events[before, 0]]
    bytes_of = np.bincount(rows, course.added_bytes[before], minlength=len(CATEGORIES))
    breakdown = dict(zip(CATEGORIES, map(round, bytes_of.tolist()), strict=True))
    # Rests inside blocks, and free blocks beside them.
    breakdown[MemoryCategory.ALLOCATOR_OVERHEAD] = reserved - sum(breakdown.values())
    breakdown[MemoryCategory.CONTEXT_AND_WORKSPACE] += context_bytes
    first_forward = next(m.event for m in course.marks if m.phase is Phase.FORWARD)
    return Memory(
        peak_allocated_bytes=int(live[peak_at]),
        peak_reserved_bytes=reserved,
        device_bytes=reserved + context_bytes,
        loaded_bytes=int(live[first_forward - 1]),
        phase_peak_bytes={str(phase): peak for phase, peak in phase_peaks.items()},
        peak_phase=str(max(phase_peaks, key=phase_peaks.__getitem__)),
        breakdown={str(category): size for category, size in breakdown.items()},
        paged_bytes=course.paged_bytes,
    )


def _phase_peaks(live: NDArray[np.int64], marks: Sequence[Mark]) -> dict[Phase, int]:
    peaks: dict[Phase, int] = {phase: 0 for phase in Phase if phase not in _OTHERS}
    ends = [mark.event for mark in marks[1:]] + [len(live)]
    for mark, end in zip(marks, ends, strict=True):
        # What a phase inherits is live when it begins, even if it allocates nothing.
        inside = live[max(mark.event - 1, 0) : end].max(initial=0)
        peaks[mark.phase] = max(peaks.get(mark.phase, 0), int(inside))
    return peaks


def category_of(block: Block) -> MemoryCategory:
    """The purpose of a block, by its label, its width and the phase that made it."""
    if block.is_logits and block.category in _HOLDS_LOGITS:
        return MemoryCategory.LOGITS_AND_LOSS
    if block.category is not None:
        return block.category
    # Made while loading and never labelled: weights that k-bit preparation replaced by a
    # wider copy.
    return MemoryCategory.WEIGHTS if block.born_phase is Phase.LOAD else MemoryCategory.TEMPORARY
