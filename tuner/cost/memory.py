"""From a traced timeline to peak memory on one GPU, by use and by phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tuner.core.records import Memory, MemoryCategory, Phase
from tuner.cost.allocator import AllocatorSettings, replay, round_size
from tuner.cost.operators.timeline import Block, Mark, Timeline

_HOLDS_LOGITS = (None, MemoryCategory.ACTIVATIONS)
"""Categories that give way to LOGITS_AND_LOSS where a tensor has the vocabulary's width."""

_OTHERS = (Phase.EVALUATION, Phase.GENERATE)
"""Phases that are not in every training."""


class History(NamedTuple):
    """Bytes after each event of a timeline: in allocated blocks, and held for them."""

    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    peak_reserved: int


def block_sizes(timeline: Timeline) -> list[int]:
    """Bytes that each block takes of its device as requested; 0 for managed memory."""
    return [0 if block.paged else block.size_bytes for block in timeline.blocks]


def rounded_sizes(timeline: Timeline) -> list[int]:
    """`block_sizes`, as an allocator rounds them."""
    return [round_size(size) if size else 0 for size in block_sizes(timeline)]


def memory_history(
    timeline: Timeline,
    *,
    settings: AllocatorSettings | None = None,
    short: bool = False,
) -> History:
    """Memory after each event, by the allocator's rules; see `peak_memory`."""
    evaluation = (m.event for m in timeline.marks if short and m.phase is Phase.EVALUATION)
    replayed = replay(
        timeline.events,
        block_sizes(timeline),
        streams=[block.stream for block in timeline.blocks],
        settings=settings,
        release_at=next(evaluation, None),
        keep_history=True,
    )
    return History(replayed.allocated_bytes, replayed.reserved_bytes, replayed.peak_reserved_bytes)


def peak_memory(
    timeline: Timeline,
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
    history = memory_history(timeline, settings=settings, short=short)
    live, reserved = history.allocated, history.peak_reserved
    peak_at = max(range(len(live)), key=live.__getitem__)
    phase_peaks = _phase_peaks(live, timeline.marks)
    breakdown = _breakdown(timeline.blocks, rounded_sizes(timeline), peak_at)
    # Rests inside blocks, and free blocks beside them.
    breakdown[MemoryCategory.ALLOCATOR_OVERHEAD] = reserved - sum(breakdown.values())
    breakdown[MemoryCategory.CONTEXT_AND_WORKSPACE] += context_bytes
    first_forward = next(m.event for m in timeline.marks if m.phase is Phase.FORWARD)
    return Memory(
        peak_allocated_bytes=live[peak_at],
        peak_reserved_bytes=reserved,
        device_bytes=reserved + context_bytes,
        loaded_bytes=live[first_forward - 1],
        phase_peak_bytes={str(phase): peak for phase, peak in phase_peaks.items()},
        peak_phase=str(max(phase_peaks, key=phase_peaks.__getitem__)),
        breakdown={str(category): size for category, size in breakdown.items()},
        paged_bytes=sum(block.size_bytes for block in timeline.blocks if block.paged),
    )


def _is_live(block: Block, event: int) -> bool:
    return block.born_event <= event and not 0 <= block.died_event <= event


def _phase_peaks(live: Sequence[int], marks: list[Mark]) -> dict[Phase, int]:
    peaks: dict[Phase, int] = {phase: 0 for phase in Phase if phase not in _OTHERS}
    ends = [mark.event for mark in marks[1:]] + [len(live)]
    for mark, end in zip(marks, ends, strict=True):
        # What a phase inherits is live when it begins, even if it allocates nothing.
        inside = max(live[max(mark.event - 1, 0) : end], default=0)
        peaks[mark.phase] = max(peaks.get(mark.phase, 0), inside)
    return peaks


def _breakdown(blocks: list[Block], rounded: list[int], peak_at: int) -> dict[MemoryCategory, int]:
    """Bytes live at the peak event, by what they are for, as rounded."""
    sizes = dict.fromkeys(MemoryCategory, 0)
    for block, size in zip(blocks, rounded, strict=True):
        if _is_live(block, peak_at):
            sizes[category_of(block)] += size
    return sizes


def category_of(block: Block) -> MemoryCategory:
    """The purpose of a block, by its label, its width and the phase that made it."""
    if block.is_logits and block.category in _HOLDS_LOGITS:
        return MemoryCategory.LOGITS_AND_LOSS
    if block.category is not None:
        return block.category
    # Made while loading and never labelled: weights that k-bit preparation replaced by a
    # wider copy.
    return MemoryCategory.WEIGHTS if block.born_phase is Phase.LOAD else MemoryCategory.TEMPORARY
