"""Compiled traces: arrays that give memory and work for many configurations at once.

Only numpy is needed here, so a cached prediction loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuner.core.kinds import MemoryCategory, Phase
from tuner.cost.allocator import (
    MIN_BLOCK_BYTES,
    SMALL_LIMIT_BYTES,
    SMALL_SEGMENT_BYTES,
    replay,
)
from tuner.cost.as_arrays import from_arrays, to_arrays
from tuner.cost.library_memory import CUBLAS_WORKSPACE_BYTES
from tuner.cost.polynomial import Terms

CATEGORIES: tuple[MemoryCategory, ...] = tuple(
    c for c in MemoryCategory if c is not MemoryCategory.UNSHARDED_GRADIENTS
)

Floats = NDArray[np.float64]


class Segment(NamedTuple):
    """One phase of one micro-step."""

    phase: Phase
    micro_step: int


SEGMENTS = tuple(
    Segment(phase, micro_step) for micro_step in (0, 1) for phase in (Phase.FORWARD, Phase.BACKWARD)
)

LOADING = len(SEGMENTS)
"""Number of the segment before the first forward pass: loading and preparing the model."""

ENDS = ("loaded", "end_of_first", "end_of_second")
"""Moments between phases whose memory is kept: before the first forward, and after each
backward pass."""


class Replayed(NamedTuple):
    """Bytes that the allocator holds beside the requested blocks, from a replay.

    `free_bytes` is reserved and not allocated. The others are the rests inside of allocated
    blocks that were not worth splitting off, when each phase has its peak; `end_bytes` when the
    optimizer begins.
    """

    free_bytes: int
    load_bytes: int
    forward_bytes: int
    backward_bytes: int
    end_bytes: int


Replays = tuple[Replayed, ...]
"""With one micro-step in an optimizer step, and with more."""


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """A traced sequence of allocations: `events` (E, 2) of block and +1 or -1.

    `sizes` says which of a structure's sizes each block has; `spans` (S + 1, 2) where the
    events of each of `SEGMENTS`, and of `LOADING`, begin and end.
    """

    events: NDArray[np.int64]
    sizes: NDArray[np.int32]
    spans: NDArray[np.int64]

    def is_consistent(self, sizes: int) -> bool:
        """Check that the blocks of the events have one of this number of `sizes`."""
        return (
            self.events.ndim == 2
            and self.events.shape[1] == 2
            and _within(self.events[:, 0], len(self.sizes))
            and bool((np.abs(self.events[:, 1]) == 1).all())
            and _within(self.sizes, sizes)
            and self.spans.shape == (len(SEGMENTS) + 1, 2)
            and _within(self.spans, len(self.events) + 1)
        )

    def replayed(self, block_bytes: Floats) -> Replays:
        """Bytes that the allocator adds with one micro-step and with two, for blocks of sizes (U,).

        Only the large pool is replayed. Of the small one, whose segments of 2 MiB fill up
        without rests, it is enough to know how much of it was in use at most.
        """
        index, sign = self.events[: self.spans[len(SEGMENTS) - 1][1]].T
        blocks = block_bytes[self.sizes].astype(np.int64)
        changes = blocks[index] * sign
        large = blocks[index] > SMALL_LIMIT_BYTES
        pool = replay(
            zip(index[large].tolist(), sign[large].tolist(), strict=True),
            blocks.tolist(),
            keep_history=True,
        )
        place = np.cumsum(large)
        small = np.cumsum(np.where(large, 0, changes))
        segments = -(-np.maximum.accumulate(small) // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
        history = _History(
            asked=np.cumsum(changes),
            allocated=np.array((0, *pool.allocated_bytes))[place] + small,
            reserved=np.array((0, *pool.reserved_bytes))[place] + segments,
        )
        return tuple(self._added(history, micro_steps) for micro_steps in (1, 2))

    def _added(self, history: _History, micro_steps: int) -> Replayed:
        numbers = [n for n, s in enumerate(SEGMENTS) if s.micro_step < micro_steps]
        end = int(self.spans[numbers[-1]][1])

        def rest(numbers: Sequence[int]) -> int:
            places = np.concatenate([np.arange(*self.spans[number]) for number in numbers])
            allocated = history.allocated[places].max(initial=0)
            return int(allocated - history.asked[places].max(initial=0))

        return Replayed(
            int(history.reserved[end - 1] - history.allocated[:end].max()),
            rest([LOADING]),
            rest([n for n in numbers if SEGMENTS[n].phase is Phase.FORWARD]),
            rest([n for n in numbers if SEGMENTS[n].phase is Phase.BACKWARD]),
            int(history.allocated[end - 1] - history.asked[end - 1]),
        )


class _History(NamedTuple):
    """Bytes after each event of a replay: of the blocks asked for, and as the allocator has it."""

    asked: NDArray[np.int64]
    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]


def _within(numbers: NDArray[Any], limit: int) -> bool:
    """Check that all numbers can be indices of `limit` items."""
    return bool((numbers >= 0).all() and (numbers < limit).all())


@dataclass(frozen=True, slots=True, eq=False)
class Operators:
    """W distinct operators: their names, kinds and dtypes, and the polynomials of their work.

    `tensor_bytes` and `tensor_of` (T,): bytes that operators touch, tensor by tensor, and the
    operator each belongs to. `shapes`: as in `Work`, four rows an operator.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    flops: Terms
    tensor_bytes: Terms
    tensor_of: NDArray[np.int32]
    shapes: Terms
    has_shape: NDArray[np.bool_]

    def moved_bytes(self, points: Floats) -> Floats:
        """Bytes that each operator reads and writes; shape (W, points)."""
        moved = np.zeros((len(self.kinds), len(points)))
        np.add.at(moved, self.tensor_of, self.tensor_bytes.at(points))
        return moved

    def is_consistent(self) -> bool:
        """Check that the arrays belong together."""
        number, tensors = len(self.kinds), len(self.tensor_bytes.coefficients)
        return (
            len(self.names) == len(self.dtypes) == len(self.flops.coefficients) == number
            and self.tensor_of.shape == (tensors,)
            and _within(self.tensor_of, number)
            and len(self.shapes.coefficients) == 4 * number
            and self.has_shape.shape == (number,)
            and all(terms.is_consistent() for terms in (self.flops, self.tensor_bytes, self.shapes))
        )


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """Sizes of parameters, with how many there are of each."""

    sizes: Terms
    counts: NDArray[np.int64]

    def total(self, points: Floats) -> Floats:
        """Number of all of them; shape (points,)."""
        total: Floats = self.counts @ self.sizes.at(points)
        return total

    def is_consistent(self) -> bool:
        """Check that the arrays belong together."""
        return self.counts.shape == (len(self.sizes.coefficients),) and self.sizes.is_consistent()


@dataclass(frozen=True, slots=True, eq=False)
class CompiledPasses:
    """The forward and backward passes of one structure at full depth.

    Shapes: K moments that can be the peak, U distinct block sizes, C memory categories,
    W distinct operators, S segments.

    `counts` (K, C, U): live blocks of each size at each moment, by category; `segments` (K,)
    says in which of `SEGMENTS` the moment lies, or that it lies in `LOADING`. `ends` (3, C, U):
    the same at `ENDS`. `workspace` is the index of the size that is a cuBLAS workspace, or -1.

    `executions` (S, 2, W): how often each operator runs in each segment, first not recomputed,
    then recomputed.

    `shallow` and `deep` are the events of the base model and of one with some more layers, for
    replaying the allocator. The full model has `depth_ratio` times as many more.

    `trainable` parameters are those that the optimizer updates, with a kind each, `idle` those
    that it has and that get no gradient, `frozen` the others.
    """

    sizes: Terms
    counts: NDArray[np.int32]
    segments: NDArray[np.int8]
    ends: NDArray[np.int32]
    workspace: int
    operators: Operators
    executions: NDArray[np.int64]
    shallow: Events
    deep: Events
    depth_ratio: float
    trainable: Parameters
    trainable_kinds: tuple[str, ...]
    idle: Parameters
    frozen: Parameters
    remarks: tuple[str, ...]

    def rounded_bytes(self, points: Floats, workspace_bytes: int) -> Floats:
        """Bytes of a block of each size as the allocator rounds it; shape (U, points)."""
        sizes = self.sizes.at(points)
        if self.workspace >= 0:
            sizes[self.workspace] = workspace_bytes
        rounded: Floats = np.ceil(sizes / MIN_BLOCK_BYTES - 1e-9) * MIN_BLOCK_BYTES
        return rounded

    def live_bytes(self, block_bytes: Floats) -> Floats:
        """Allocated bytes at each moment; shape (K, points)."""
        live: Floats = self.counts.sum(axis=1).astype(np.float64) @ block_bytes
        return live

    def end_bytes(self, block_bytes: Floats) -> Floats:
        """Allocated bytes at `ENDS`; shape (3, points)."""
        live: Floats = self.ends.sum(axis=1).astype(np.float64) @ block_bytes
        return live

    def trainable_params(self, points: Floats) -> Floats:
        """Number of trainable parameters, idle ones included; shape (points,)."""
        total: Floats = self.trainable.total(points) + self.idle.total(points)
        return total

    def replayed(self, point: Floats) -> Replays:
        """Bytes that a replay adds at a point (3,), with one micro-step and with more.

        Free memory beside what is allocated comes from the few large blocks around the output
        head and within one layer, and further layers repeat the same sizes: it is that of the
        base model. Rests inside blocks grow with the layers: they follow a line through the
        base model and a deeper one.
        """
        rounded = self.rounded_bytes(point[None, :], CUBLAS_WORKSPACE_BYTES)[:, 0]
        both = zip(self.shallow.replayed(rounded), self.deep.replayed(rounded), strict=True)
        return tuple(self._at_full_depth(shallow, deep) for shallow, deep in both)

    def _at_full_depth(self, shallow: Replayed, deep: Replayed) -> Replayed:
        rests = (
            round(base + self.depth_ratio * (more - base))
            for base, more in zip(shallow[1:], deep[1:], strict=True)
        )
        return Replayed(shallow.free_bytes, *rests)

    def depends_on_length_alone(self) -> bool:
        """True if a size grows with the square of the length, as eager attention's do."""
        used = self.sizes.coefficients != 0
        return bool((self.sizes.exponents[:, :, 1][used] > 1).any())

    def to_arrays(self) -> dict[str, Any]:
        """Everything as named arrays without objects, for a cache that cannot run code."""
        return to_arrays(self)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> CompiledPasses:
        """The inverse of `to_arrays`. Raises KeyError or ValueError when it does not fit."""
        read = from_arrays(cls, arrays)
        read._require_consistent()
        return read

    def _require_consistent(self) -> None:
        """Raise ValueError unless the arrays belong together."""
        sizes, operators = len(self.sizes.coefficients), len(self.operators.kinds)
        moments, categories = len(self.segments), len(CATEGORIES)
        parts = (self.operators, self.trainable, self.idle, self.frozen, self.sizes)
        fits = (
            self.counts.shape == (moments, categories, sizes),
            set(self.segments.tolist()) == {*range(len(SEGMENTS)), LOADING},
            self.ends.shape == (len(ENDS), categories, sizes),
            -1 <= self.workspace < sizes,
            self.executions.shape == (len(SEGMENTS), 2, operators),
            len(self.trainable_kinds) == len(self.trainable.counts),
            *(events.is_consistent(sizes) for events in (self.shallow, self.deep)),
            *(part.is_consistent() for part in parts),
        )
        if not all(fits):
            raise ValueError("arrays of a compiled structure that do not belong together")
