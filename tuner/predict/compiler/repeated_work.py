"""Operators of a deeper model, from those of models of a few layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tuner.cost.operators.timeline import Op, Timeline, Work
from tuner.predict.compiler.free_rules import Different


def line(values: Sequence[int], more: Sequence[int]) -> int:
    """What follows for so many further layers of each kind. Raises `Different`.

    `values` are those of the base model, of one more layer of each kind, and of two more layers.
    """
    first, *ones, two = values
    by_kind = [one - first for one in ones]
    if two - first != by_kind[0] + by_kind[-1]:
        raise Different
    return first + sum(each * number for each, number in zip(by_kind, more, strict=True))


def operators(timelines: Sequence[Timeline], more: Sequence[int]) -> tuple[list[Work], list[Op]]:
    """The operators at full depth, and each of their executions; in a phase without an order."""
    counts = [_executions(timeline) for timeline in timelines]
    numbers: dict[Work, int] = {}
    ops: list[Op] = []
    left: list[dict[Any, list[Work]]] = [defaultdict(list) for _ in counts]
    for key in dict.fromkeys(key for each in counts for key in each):
        mark, recompute, work = key
        times = [each[key] for each in counts]
        by_kind = [one - times[0] for one in times[1:-1]]
        if times[-1] - times[0] == by_kind[0] + by_kind[-1] and min(by_kind) >= 0:
            ops += [Op(numbers.setdefault(work, len(numbers)), mark, recompute)] * line(times, more)
            continue
        kind = mark, recompute, work.name, work.kind, work.dtype, work.shape, work.workspace_bytes
        for works, number in zip(left, times, strict=True):
            works[kind] += [work] * number
    for kind in dict.fromkeys(kind for works in left for kind in works):
        for work in _grown([works[kind] for works in left], more):
            ops.append(Op(numbers.setdefault(work, len(numbers)), kind[0], kind[1]))
    return [*numbers], ops


def _executions(timeline: Timeline) -> Counter[tuple[int, bool, Work]]:
    return Counter((op.mark, op.recompute, timeline.works[op.work]) for op in timeline.ops)


def _grown(works: Sequence[list[Work]], more: Sequence[int]) -> Iterator[Work]:
    """Operators that take in all layers, as an optimizer's: they grow with the depth."""
    if len({len(each) for each in works}) != 1:
        raise Different
    for alike in zip(*works, strict=True):
        moved = line([work.bytes_moved for work in alike], more)
        flops = line([work.flops for work in alike], more)
        yield alike[0]._replace(flops=flops, tensor_bytes=(moved,))
