"""The smallest configurations known to run out of memory, and all that cannot fit for that."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.records import Configuration
from tuner.workloads.memory_order import MemoryOrder

Places = NDArray[np.intp]


class OomFrontier:
    """What is known not to fit among configurations, by those that ran out of memory.

    A configuration is covered when a known one that ran out is nowhere larger, in the knobs that
    the workload declares monotone, and equal in all others. Sound where that declaration is.
    """

    def __init__(self, configurations: Sequence[Configuration], order: MemoryOrder) -> None:
        parts = [order.split(configuration) for configuration in configurations]
        names = sorted({name for places, _ in parts for name in places})
        # A knob that has no place here is among the others there, and keeps the two apart.
        self._places = np.array(
            [[places.get(name, 0.0) for name in names] for places, _ in parts]
        ).reshape(len(parts), len(names))
        groups: dict[object, int] = {}
        self._group = np.array([groups.setdefault(others, len(groups)) for _, others in parts])
        self._known: list[int] = []

    @property
    def known(self) -> tuple[int, ...]:
        """Places of the smallest that ran out of memory; none of them covers another."""
        return tuple(self._known)

    def ran_out(self, place: int) -> None:
        """The configuration at `place` ran out of memory."""
        if self.witness(place) is not None:
            return
        smaller = self._at_least(place)
        self._known = [other for other in self._known if not smaller[other]] + [place]

    def fitted(self, place: int) -> None:
        """The configuration at `place` fitted.

        What ran out and is no larger did so for another reason (a process beside it, for
        example), and no longer counts.
        """
        self._known = [other for other in self._known if not self._at_least(other)[place]]

    def covered(self) -> NDArray[np.bool_]:
        """Which configurations cannot fit, shape (configurations,)."""
        found = np.zeros(len(self._group), dtype=bool)
        for place in self._known:
            found |= self._at_least(place)
        return found

    def witness(self, place: int) -> int | None:
        """A known one because of which `place` cannot fit; None when there is none."""
        return next((known for known in self._known if self._at_least(known)[place]), None)

    def _at_least(self, place: int) -> NDArray[np.bool_]:
        """Which are at least as large as the one at `place`, itself included."""
        larger = (self._places >= self._places[place]).all(axis=1)
        return np.asarray(larger & (self._group == self._group[place]))
