"""Compiled optimizer steps: memory and work of the update, apart from the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tuner.estimate.allocator import settled_size
from tuner.estimate.work_arrays import WorkArrays
from tuner.records import MemoryCategory

if TYPE_CHECKING:  # tracing imports torch, which a cached result does without
    import torch


@dataclass(frozen=True, slots=True)
class CompiledOptimizer:
    """What an optimizer adds to parameters and gradients.

    `state_bytes` stays allocated from the first step on; `peak_bytes` is the most that is
    allocated at once while it updates, state included; `paged_bytes` is managed memory.
    `bytes_moved` and `flops` are the work of one later step.
    """

    state_bytes: int
    peak_bytes: int
    paged_bytes: int
    bytes_moved: int
    flops: int

    def to_dict(self) -> dict[str, int]:
        """JSON types only."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompiledOptimizer:
        """The inverse of `to_dict`. Raises KeyError, TypeError or ValueError when malformed."""
        return cls(**{name: int(data[name]) for name in cls.__dataclass_fields__})


def compile_optimizer(
    name: str, trainable: Mapping[tuple[int, torch.dtype], int], *, max_grad_norm: float
) -> CompiledOptimizer:
    """Trace two steps of an optimizer; `trainable` counts the parameters of each size and dtype.

    Traced with two parameters of each kind, and once more with a third of each kind in turn:
    what an optimizer does is the same for every further parameter, so all quantities are affine
    in the counts. (Multi-tensor optimizers add up their buffers, the others reuse them.)
    """
    base = dict.fromkeys(trainable, 2)
    at_base = _quantities(name, base, max_grad_norm)
    total = at_base.copy()
    for kind, count in trainable.items():
        more = _quantities(name, {**base, kind: 3}, max_grad_norm)
        total += (count - 2) * (more - at_base)
    state, peak, paged, moved, flops = (int(value) for value in total)
    return CompiledOptimizer(state, peak, paged, moved, flops)


def _quantities(
    name: str, trainable: Mapping[tuple[int, torch.dtype], int], max_grad_norm: float
) -> NDArray[np.int64]:
    """The fields of `CompiledOptimizer` for these parameters, from a trace."""
    from tuner.estimate.trace import trace_optimizer
    from tuner.estimate.work_arrays import optimizer_executions_of

    parameters = [kind for kind, count in trainable.items() for _ in range(count)]
    timeline = trace_optimizer(name, parameters, max_grad_norm=max_grad_norm)
    given = (MemoryCategory.ADAPTERS, MemoryCategory.GRADIENTS)
    added = [
        0 if block.paged or block.category in given else settled_size(block.size_bytes)
        for block in timeline.blocks
    ]
    live = accumulate(added[index] * sign for index, sign in timeline.events)
    state = sum(
        size
        for size, block in zip(added, timeline.blocks, strict=True)
        if block.category is MemoryCategory.OPTIMIZER_STATE
    )
    paged = sum(block.size_bytes for block in timeline.blocks if block.paged)
    counts = optimizer_executions_of(timeline, step=1).tolist()
    works = list(zip(timeline.works, counts, strict=True))
    moved = sum(work.bytes_moved * count for work, count in works)
    flops = sum(work.flops * count for work, count in works)
    return np.array([state, max(live, default=0), paged, moved, flops], dtype=np.int64)


def work_arrays(optimizer: CompiledOptimizer) -> tuple[WorkArrays, NDArray[np.int64]]:
    """The kernels of a step, taken together, as `WorkArrays` at one point; they run once."""
    arrays = WorkArrays(
        kinds=np.array(["optimizer"]),
        dtypes=np.array(["float32"]),
        flops=np.array([[float(optimizer.flops)]]),
        bytes_moved=np.array([[float(optimizer.bytes_moved)]]),
        shapes=np.ones((1, 4, 1)),
        has_shape=np.zeros(1, dtype=bool),
    )
    return arrays, np.ones(1, dtype=np.int64)
