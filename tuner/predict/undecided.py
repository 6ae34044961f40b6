"""Which configurations may be on a front, when their numbers are known within bounds only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Gains = Sequence[Sequence[float]]
"""Of each configuration a number for each goal, to be large; minus infinity where there is none."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The configurations at one end of their bounds: their gains, and which of them fit."""

    gains: Gains
    fits: Sequence[bool]


def undecided(best: Bound, worst: Bound) -> list[int]:
    """Places of what may be on the front, the best of the first goal first.

    That is what fits at its best, and then is not beaten by what fits at its worst.
    """
    hopes, certain = (np.array(bound.gains, dtype=float) for bound in (best, worst))
    may_fit, surely = (np.array(bound.fits, dtype=bool) for bound in (best, worst))
    places = np.flatnonzero(may_fit & ~_beaten(hopes, certain[surely]))
    found: list[int] = places[np.argsort(-hopes[places, 0], kind="stable")].tolist()
    return found


def _beaten(hopes: NDArray[np.float64], certain: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows are worse than a row of `certain` whatever comes: shapes (N, goals), (M, goals).

    Only its front is looked at: what it beats, beats nothing that it does not beat itself.
    """
    beaten = np.zeros(len(hopes), dtype=bool)
    left = certain[np.lexsort(-certain.T[::-1])]
    while len(left):
        best = left[0]
        beaten |= (hopes <= best).all(axis=1) & (hopes < best).any(axis=1)
        left = left[~(left <= best).all(axis=1)]
    return beaten
