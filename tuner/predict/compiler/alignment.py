"""Where a deeper model's sequence of events repeats that of a shallow one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_NEVER = np.int32(1 << 30)


class Alignment(NamedTuple):
    """For each element of the shorter sequence, its index in the longer one; twice.

    Where an inserted run repeats what surrounds it (a layer among equal layers), its place is
    a matter of choice: in `late` it stands as late as possible, so that the shorter sequence's
    elements are the first of their kind, and in `early` they are the last.
    """

    late: NDArray[np.int64]
    early: NDArray[np.int64]


def align(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> Alignment | None:
    """How `theirs` arises from `ours` by inserting as few runs as possible; None if it does not.

    Exact, by dynamic programming over element and shift: O(len(ours) * number inserted).
    """
    if len(theirs) < len(ours):
        return None
    if not len(ours):
        return Alignment(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    costs = _costs(ours, theirs)
    total = costs[-1] + _trailing(costs.shape[1])
    if total.min() >= _NEVER:
        return None
    ends = np.nonzero(total == total.min())[0]
    places = np.arange(len(ours))
    return Alignment(
        late=places + _shifts(costs, int(ends[0]), late=True),
        early=places + _shifts(costs, int(ends[-1]), late=False),
    )


def _trailing(width: int) -> NDArray[np.int32]:
    """One run more where the insertions before the end are not all."""
    trailing = np.ones(width, dtype=np.int32)
    trailing[-1] = 0
    return trailing


def _costs(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> NDArray[np.int32]:
    """Fewest runs inserted before each element, by the number of elements in them."""
    width = len(theirs) - len(ours) + 1
    costs = np.empty((len(ours), width), dtype=np.int32)
    before = np.ones(width, dtype=np.int32)
    before[0] = 0
    inserted = np.full(width, _NEVER, dtype=np.int32)
    for element, token in enumerate(ours):
        np.minimum.accumulate(before[:-1], out=inserted[1:])
        inserted[1:] += 1
        np.minimum(before, inserted, out=costs[element])
        costs[element][theirs[element : element + width] != token] = _NEVER
        before = costs[element]
    return costs


def _shifts(costs: NDArray[np.int32], end: int, *, late: bool) -> NDArray[np.int64]:
    """How many elements are inserted before each one, from the last to the first."""
    shifts = np.empty(len(costs), dtype=np.int64)
    shift = end
    for element in range(len(costs) - 1, 0, -1):
        shifts[element] = shift
        stays = costs[element - 1, shift] == costs[element, shift]
        if stays and not late:
            continue
        jumps = np.nonzero(costs[element - 1, :shift] == costs[element, shift] - 1)[0]
        if len(jumps):
            shift = int(jumps[0] if late else jumps[-1])
    shifts[0] = shift
    return shifts
