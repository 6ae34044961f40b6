"""The smallest configurations known to run out of memory, and all that cannot fit for that."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.core.records import Configuration
from tuner.predict.training.memory_order import MemoryOrder

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
        self._group = np.array(
            [groups.setdefault(others, len(groups)) for _, others in parts], dtype=np.intp
        )
        by_group = np.argsort(self._group, kind="stable")
        ends = np.cumsum(np.bincount(self._group, minlength=len(groups)))
        self._members = np.split(by_group, ends[:-1])
        self._known: dict[int, Places] = {}
        """The smallest that ran out, each with all that are at least as large."""
        self._covering = np.zeros(len(parts), dtype=np.intp)
        """How many known ones cover each. Kept up to date, so that a thousand trials in a row that
        run out of memory cost no more each than the first did."""

    @property
    def known(self) -> tuple[int, ...]:
        """Places of the smallest that ran out of memory; none of them covers another."""
        return tuple(self._known)

    def ran_out(self, place: int) -> None:
        """The configuration at `place` ran out of memory."""
        if self._covering[place]:
            return
        larger = self._at_least(place)
        for other in [other for other in larger.tolist() if other in self._known]:
            self._forget(other)
        self._known[place] = larger
        self._covering[larger] += 1

    def fitted(self, place: int) -> None:
        """The configuration at `place` fitted.

        What ran out and is no larger did so for another reason (a process beside it, for
        example), and no longer counts.
        """
        for other in self._witnesses(place):
            self._forget(other)

    def covered(self) -> NDArray[np.bool_]:
        """Which configurations cannot fit, shape (configurations,)."""
        return self._covering > 0

    def witness(self, place: int) -> int | None:
        """A known one because of which `place` cannot fit; None when there is none."""
        return next(iter(self._witnesses(place)), None)

    def _witnesses(self, place: int) -> list[int]:
        if not self._covering[place]:
            return []
        return [known for known, larger in self._known.items() if place in larger]

    def _forget(self, known: int) -> None:
        self._covering[self._known.pop(known)] -= 1

    def _at_least(self, place: int) -> Places:
        """Those that are at least as large as the one at `place`, itself included."""
        members = self._members[self._group[place]]
        larger: Places = members[(self._places[members] >= self._places[place]).all(axis=1)]
        return larger
