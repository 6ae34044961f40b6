"""Compiled traces: arrays that give memory and work for many configurations at once.

Only numpy is needed here, so a cached prediction loads neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuner.estimate.allocator import (
    LARGE_OWN_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_LIMIT_BYTES,
    replay,
)
from tuner.estimate.polynomial import Terms
from tuner.estimate.workspace import CUBLAS_WORKSPACE_BYTES
from tuner.records import MemoryCategory, Phase

CATEGORIES = tuple(MemoryCategory)

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


@dataclass(frozen=True, slots=True, eq=False)
class CompiledPasses:
    """The forward and backward passes of one structure at full depth.

    Shapes: K moments that can be the peak, U distinct block sizes, C memory categories,
    W distinct operators, S segments.

    `counts` (K, C, U): live blocks of each size at each moment, by category; `segments` (K,)
    says in which of `SEGMENTS` the moment lies, or that it lies in `LOADING`. `ends` (3, C, U):
    the same at `ENDS`. `workspace` is the index of the size that is a cuBLAS workspace, or -1.

    `tensor_bytes` and `tensor_of` (T,): bytes that operators touch, tensor by tensor, and the
    operator each belongs to. `shapes`: (batch, m, n, k) of products, four rows an operator.
    `executions` (S, 2, W): how often each operator runs in each segment, first not recomputed,
    then recomputed.

    `shallow_events` and `shallow_blocks` are the base model's own events and the size of each
    of its blocks, for replaying the allocator.
    """

    sizes: Terms
    counts: NDArray[np.int32]
    segments: NDArray[np.int8]
    ends: NDArray[np.int32]
    workspace: int
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    flops: Terms
    tensor_bytes: Terms
    tensor_of: NDArray[np.int32]
    shapes: Terms
    has_shape: NDArray[np.bool_]
    executions: NDArray[np.int64]
    shallow_events: NDArray[np.int64]
    shallow_blocks: NDArray[np.int32]
    trainable: Terms
    trainable_counts: NDArray[np.int64]
    trainable_dtypes: tuple[str, ...]
    frozen_params: int

    def block_bytes(self, points: Floats, workspace_bytes: int) -> Floats:
        """Bytes that a block of each size counts as allocated; shape (U, points)."""
        sizes = self.sizes.at(points)
        if self.workspace >= 0:
            sizes[self.workspace] = workspace_bytes
        rounded: Floats = np.ceil(sizes / MIN_BLOCK_BYTES - 1e-9) * MIN_BLOCK_BYTES
        # As `allocator.settled_size`, for arrays.
        segments = np.ceil(rounded / ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        alone = rounded >= LARGE_OWN_SEGMENT_BYTES
        settled: Floats = np.where(
            alone & (segments - rounded <= SMALL_LIMIT_BYTES), segments, rounded
        )
        return settled

    def live_bytes(self, block_bytes: Floats) -> Floats:
        """Allocated bytes at each moment; shape (K, points)."""
        live: Floats = self.counts.sum(axis=1).astype(np.float64) @ block_bytes
        return live

    def end_bytes(self, block_bytes: Floats) -> Floats:
        """Allocated bytes at `ENDS`; shape (3, points)."""
        live: Floats = self.ends.sum(axis=1).astype(np.float64) @ block_bytes
        return live

    def trainable_params(self, points: Floats) -> Floats:
        """Number of trainable parameters; shape (points,)."""
        total: Floats = self.trainable_counts @ self.trainable.at(points)
        return total

    def moved_bytes(self, points: Floats) -> Floats:
        """Bytes that each operator reads and writes; shape (W, points)."""
        moved = np.zeros((len(self.kinds), len(points)))
        np.add.at(moved, self.tensor_of, self.tensor_bytes.at(points))
        return moved

    def shallow_overhead_bytes(self, point: Floats) -> int:
        """Bytes that the allocator reserves beyond what is allocated, at one point (3,).

        From replaying the base model's events: fragmentation comes from the few large blocks
        around the output head and within one layer, and further layers repeat the same sizes.
        """
        sizes = self.block_bytes(point[None, :], CUBLAS_WORKSPACE_BYTES)[:, 0]
        blocks = sizes[self.shallow_blocks].astype(np.int64).tolist()
        result = replay(map(tuple, self.shallow_events.tolist()), blocks)
        return result.peak_reserved_bytes - result.peak_allocated_bytes

    def depends_on_length_alone(self) -> bool:
        """Whether a size grows with the square of the length, as eager attention's do."""
        used = self.sizes.coefficients != 0
        return bool((self.sizes.exponents[:, :, 1][used] > 1).any())

    def to_arrays(self) -> dict[str, Any]:
        """Everything as named arrays without objects, for a cache that cannot run code."""
        arrays: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Terms):
                arrays[f"{name}.coefficients"] = value.coefficients
                arrays[f"{name}.exponents"] = value.exponents
            elif isinstance(value, tuple):
                arrays[name] = np.array(value, dtype=np.str_)
            else:
                arrays[name] = np.asarray(value)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Any) -> CompiledPasses:
        """The inverse of `to_arrays`. Raises KeyError or ValueError when it does not fit."""
        fields: dict[str, Any] = {}
        for name, declared in cls.__dataclass_fields__.items():
            if declared.type == "Terms":
                fields[name] = Terms(arrays[f"{name}.coefficients"], arrays[f"{name}.exponents"])
            elif declared.type == "tuple[str, ...]":
                fields[name] = tuple(str(item) for item in arrays[name])
            elif declared.type == "int":
                fields[name] = int(arrays[name])
            else:
                fields[name] = arrays[name]
        return cls(**fields)
