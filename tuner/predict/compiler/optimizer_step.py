"""Compiled optimizer steps: memory and work of the update, apart from the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuner.core.records import MemoryCategory
from tuner.cost.allocator import replay, settled_size
from tuner.cost.work_arrays import WorkArrays, optimizer_executions_of

Trained = Callable[[int], list[tuple[int, int, str]]]
"""The parameters that are trained at a rank of LoRA: elements, number and kind of each."""


@dataclass(frozen=True, slots=True)
class CompiledOptimizer:
    """Memory and work that an optimizer adds to parameters and gradients.

    `state_bytes` stays allocated from the first step on; `peak_bytes` is the most that is
    allocated at once while it updates, state included; `paged_bytes` is managed memory.
    `kernels` is the work of one later step: groups of like kernels, each with the number of
    them and the bytes and FLOPs of all.
    """

    state_bytes: int
    peak_bytes: int
    paged_bytes: int
    kernels: tuple[tuple[int, int, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompiledOptimizer:
        """The inverse of `to_dict`. Raises KeyError, TypeError or ValueError when malformed."""
        state, peak, paged = (
            int(data[name]) for name in ("state_bytes", "peak_bytes", "paged_bytes")
        )
        kernels = tuple((int(n), int(moved), int(flops)) for n, moved, flops in data["kernels"])
        return cls(state, peak, paged, kernels)


def compile_optimizer(
    name: str,
    trainable: Mapping[tuple[int, str], int],
    *,
    max_grad_norm: float,
    scaled: bool = False,
) -> CompiledOptimizer:
    """Trace two steps of an optimizer; `trainable` counts the parameters of each size and kind.

    `max_grad_norm` and `scaled` as in `trace_optimizer`.

    Traced with two parameters of each kind, and once more with a third of each kind in turn:
    what an optimizer does is the same for every further parameter, so all quantities are affine
    in the counts. (Multi-tensor optimizers add up their buffers, the others reuse them.)
    """
    base = dict.fromkeys(trainable, 2)
    traced = _quantities(name, base, max_grad_norm, scaled)
    total = traced.memory.copy()
    left = {operator: amount.copy() for operator, amount in traced.work.items()}
    groups, states = [], []
    for kind, count in trainable.items():
        more = _quantities(name, {**base, kind: 3}, max_grad_norm, scaled)
        total += (count - 2) * (more.memory - traced.memory)
        states.append((count, list((more.states - traced.states).elements())))
        for operator, amount in more.work.items():
            added = amount - traced.work[operator]
            if added[0] > 0:  # one kernel, or a few, for each parameter
                groups.append(count * added)
                left[operator] -= 2 * added
            else:  # one kernel for all parameters
                left[operator] += (count - 2) * added
    kernels = tuple(
        (int(number), int(moved), int(flops))
        for number, moved, flops in (*groups, *left.values())
        if number > 0
    )
    state, peak, paged = (int(value) for value in total)
    rests = _rests(states)
    return CompiledOptimizer(state + rests, peak + rests, paged, kernels)


def _rests(states: Sequence[tuple[int, Sequence[int]]]) -> int:
    """Bytes in blocks of state beyond their own size, in a fresh allocator.

    `states` has, for each kind of parameter, their number and the sizes of the state of one.
    Kinds alternate as they do in a model of equal layers.
    """
    order = sorted(
        ((place + 0.5) / count, kind)
        for kind, (count, _) in enumerate(states)
        for place in range(count)
    )
    sizes = [size for _, kind in order for size in states[kind][1]]
    result = replay([(index, 1) for index in range(len(sizes))], sizes)
    return result.peak_allocated_bytes - sum(map(settled_size, sizes))


class _Quantities(NamedTuple):
    """Build it from one traced optimizer."""

    memory: NDArray[np.int64]
    """State, peak and paged bytes."""
    states: Counter[int]
    """Sizes of the blocks of state that are no managed memory."""
    work: dict[str, NDArray[np.int64]]
    """Kernels, and bytes and FLOPs of all of them, by operator."""


def _quantities(
    name: str,
    trainable: Mapping[tuple[int, str], int],
    max_grad_norm: float,
    scaled: bool,
) -> _Quantities:
    """The optimizer's memory and work for these parameters, from a trace."""
    from tuner.predict.tracing.trace import trace_optimizer

    parameters = [kind for kind, count in trainable.items() for _ in range(count)]
    timeline = trace_optimizer(name, parameters, max_grad_norm=max_grad_norm, scaled=scaled)
    given = (MemoryCategory.ADAPTERS, MemoryCategory.GRADIENTS)
    added = [
        0 if block.paged or block.category in given else settled_size(block.size_bytes)
        for block in timeline.blocks
    ]
    live = accumulate(added[index] * sign for index, sign in timeline.events)
    states = Counter(
        block.size_bytes
        for block in timeline.blocks
        if block.category is MemoryCategory.OPTIMIZER_STATE and not block.paged
    )
    state = sum(settled_size(size) * number for size, number in states.items())
    paged = sum(block.size_bytes for block in timeline.blocks if block.paged)
    counts = optimizer_executions_of(timeline).tolist()
    work: dict[str, NDArray[np.int64]] = {}
    for item, count in zip(timeline.works, counts, strict=True):
        amount = np.array([count, count * item.bytes_moved, count * item.flops], dtype=np.int64)
        work[item.name] = work.get(item.name, np.zeros(3, dtype=np.int64)) + amount
    memory = np.array([state, max(live, default=0), paged], dtype=np.int64)
    return _Quantities(memory, states, work)


def work_arrays(optimizer: CompiledOptimizer) -> tuple[WorkArrays, NDArray[np.int64]]:
    """The kernels of a step as `WorkArrays` at one point, a row a group, and their numbers."""
    numbers, moved, flops = np.array(optimizer.kernels, dtype=float).reshape(-1, 3).T
    arrays = WorkArrays(
        names=np.full(len(numbers), "optimizer"),
        kinds=np.full(len(numbers), "optimizer"),
        dtypes=np.full(len(numbers), "float32"),
        flops=(flops / numbers)[:, None],
        bytes_moved=(moved / numbers)[:, None],
        shapes=np.ones((len(numbers), 4, 1)),
        has_shape=np.zeros(len(numbers), dtype=bool),
    )
    return arrays, numbers.astype(np.int64)
