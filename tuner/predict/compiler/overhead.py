"""What the allocator adds to the sums of blocks, for many points from a few replays of it.

A replay takes some ten milliseconds, so a whole space is replayed at anchor points: every
number of tokens (or batch and length, where memory grows with the square of the length), at
the smallest and the largest rank. Between the ranks the overhead is interpolated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tuner.cost.compiled import CompiledPasses, Floats, Replayed, Replays

Point = tuple[int, ...]
"""Micro-batch, length, rank, negatives."""

EXACT_UP_TO = 6
"""So many points are replayed themselves."""

LARGEST_GPU_BYTES = 288 * 1024**3
"""What allocates more fits no GPU of the catalogue (B300: 268 GiB): its overhead is left 0."""


def anchors(points: Floats, passes: CompiledPasses) -> dict[Point, list[Point]]:
    """For each point, the points to replay: itself, or one at the smallest and largest rank."""
    whole: list[Point] = [tuple(map(int, point)) for point in points]
    if len(whole) <= EXACT_UP_TO:
        return {point: [point] for point in whole}
    by_length = passes.depends_on_length_alone()
    low, high = min(p[2] for p in whole), max(p[2] for p in whole)
    stands_for: dict[tuple[int, ...], tuple[int, int]] = {}
    chosen = {}
    for batch, length, rank, *rest in whole:
        group = (batch, length, *rest) if by_length else (batch * length, *rest)
        batch_of_group, length_of_group = stands_for.setdefault(group, (batch, length))
        ranks = [low] if low == high else [low, high]
        places = [(batch_of_group, length_of_group, r, *rest) for r in ranks]
        chosen[batch, length, rank, *rest] = places
    return chosen


def replay_all(passes: CompiledPasses, points: Sequence[Point]) -> dict[Point, Replays]:
    """What a replay adds at each of these points, with one micro-step and with more."""
    return {point: passes.replayed(np.array(point, dtype=float)) for point in points}


def interpolate(
    points: Floats, chosen: Mapping[Point, Sequence[Point]], replayed: Mapping[Point, Replays]
) -> Floats:
    """The replays at each point (P, 4), from those at its anchors: (P, 2, fields of `Replayed`)."""
    result = np.zeros((len(points), 2, len(Replayed._fields)))
    for index, point in enumerate(points):
        places, rank = chosen[tuple(map(int, point))], point[2]
        known = sorted(place for place in places if place in replayed)
        if known:
            low, high = known[0], known[-1]
            share = 0.0 if low == high else (rank - low[2]) / (high[2] - low[2])
            at_low, at_high = np.array(replayed[low]), np.array(replayed[high])
            result[index] = at_low + share * (at_high - at_low)
    return result
