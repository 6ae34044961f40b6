"""Compiled optimizer steps: memory and work of the update, apart from the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.estimate.allocator import round_size
from tuner.records import MemoryCategory

if TYPE_CHECKING:  # tracing imports torch, which a cached result does without
    import torch


@dataclass(frozen=True, slots=True)
class CompiledOptimizer:
    """What an optimizer adds to parameters and gradients.

    `state_bytes` stays allocated from the first step on; `peak_bytes` is the most that is
    allocated at once while it updates, state included; `paged_bytes` is managed memory. `works`
    lists (bytes moved, FLOPs, times run) of the kernels of one later step.
    """

    state_bytes: int
    peak_bytes: int
    paged_bytes: int
    works: tuple[tuple[int, int, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "state_bytes": self.state_bytes,
            "peak_bytes": self.peak_bytes,
            "paged_bytes": self.paged_bytes,
            "works": [list(work) for work in self.works],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompiledOptimizer:
        """The inverse of `to_dict`. Raises KeyError, TypeError or ValueError when malformed."""
        return cls(
            state_bytes=int(data["state_bytes"]),
            peak_bytes=int(data["peak_bytes"]),
            paged_bytes=int(data["paged_bytes"]),
            works=tuple((int(a), int(b), int(c)) for a, b, c in data["works"]),
        )


def compile_optimizer(
    name: str, trainable: Sequence[tuple[int, torch.dtype]], *, max_grad_norm: float
) -> CompiledOptimizer:
    """Trace two steps of an optimizer on parameters of these sizes and dtypes."""
    from tuner.estimate.trace import trace_optimizer
    from tuner.estimate.work_arrays import optimizer_executions_of

    timeline = trace_optimizer(name, trainable, max_grad_norm=max_grad_norm)
    given = (MemoryCategory.ADAPTERS, MemoryCategory.GRADIENTS)
    added = [
        0 if block.paged or block.category in given else round_size(block.size_bytes)
        for block in timeline.blocks
    ]
    live = list(accumulate(added[index] * sign for index, sign in timeline.events))
    counts = optimizer_executions_of(timeline, step=1)
    return CompiledOptimizer(
        state_bytes=sum(
            size
            for size, block in zip(added, timeline.blocks, strict=True)
            if block.category is MemoryCategory.OPTIMIZER_STATE
        ),
        peak_bytes=max(live, default=0),
        paged_bytes=sum(block.size_bytes for block in timeline.blocks if block.paged),
        works=tuple(
            (work.bytes_moved, work.flops, int(count))
            for work, count in zip(timeline.works, counts, strict=True)
            if count
        ),
    )


def work_arrays(optimizer: CompiledOptimizer) -> Any:
    """The kernels of a step as `WorkArrays` at one point, and how often each runs."""
    from tuner.estimate.work_arrays import WorkArrays

    count = len(optimizer.works)
    table = np.array(optimizer.works, dtype=float).reshape(count, 3)
    arrays = WorkArrays(
        kinds=np.full(count, "optimizer"),
        dtypes=np.full(count, "float32"),
        flops=table[:, 1:2],
        bytes_moved=table[:, 0:1],
        shapes=np.ones((count, 4, 1)),
        has_shape=np.zeros(count, dtype=bool),
    )
    return arrays, table[:, 2].astype(np.int64)
