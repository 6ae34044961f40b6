"""Repetition of events, frees and operators of a shallow model in a deeper one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_NEVER = np.int32(1 << 30)


def align(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Places in `theirs` of the elements of `ours`, with the fewest runs between; None for none.

    Where an inserted run repeats what surrounds it (a layer among equal layers), it stands as late
    as possible, so that the elements of `ours` are the first of their kind.
    Exact, by dynamic programming over element and shift: O(len(ours) * number inserted).
    """
    if len(theirs) < len(ours):
        return None
    if not len(ours):
        return np.zeros(0, dtype=np.int64)
    costs = _costs(ours, theirs)
    total = costs[-1] + _trailing(costs.shape[1])
    if total.min() >= _NEVER:
        return None
    end = int(np.argmin(total))
    places: NDArray[np.int64] = np.arange(len(ours)) + _shifts(costs, end)
    return places


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


def _shifts(costs: NDArray[np.int32], end: int) -> NDArray[np.int64]:
    """Number of elements inserted before each one, from the last to the first."""
    shifts = np.empty(len(costs), dtype=np.int64)
    shift = end
    for element in range(len(costs) - 1, 0, -1):
        shifts[element] = shift
        jumps = np.nonzero(costs[element - 1, :shift] == costs[element, shift] - 1)[0]
        if len(jumps):
            shift = int(jumps[0])
    shifts[0] = shift
    return shifts


class Different(Exception):  # noqa: N818 - no error: a reason to trace all layers
    """The traces are not repetitions of one another."""


class Free(NamedTuple):
    """The place of a freed block among the live ones of its group."""

    from_newest: int
    from_oldest: int


class FreeRule(NamedTuple):
    """The freed one of the live blocks of a group, counted from the newest or the oldest.

    `first` in the base model, `by_kind` more for each further layer of a kind, and in the runs of
    layers `by_run` more from one run to the next.
    """

    newest: bool
    first: int
    by_kind: tuple[int, ...]
    by_run: int = 0

    def at(self, more: Sequence[int]) -> PlaceRule:
        """The rule in a model with this number of further layers of each kind."""
        by_layer = sum(each * number for each, number in zip(self.by_kind, more, strict=True))
        return PlaceRule(self.newest, self.first + by_layer, self.by_run)


class PlaceRule(NamedTuple):
    """As `FreeRule`, in a model of one depth: the place in the first run, and more in each next."""

    newest: bool
    first: int
    by_run: int


def shared_rule(base: Free, ones: Sequence[Free | None], two: Free | None) -> FreeRule:
    """The rule of an event that the base model has too. Raises `Different`."""
    for number, newest in enumerate((True, False)):
        by_kind = tuple(one[number] - base[number] for one in ones if one is not None)
        if two is not None and two[number] - base[number] == by_kind[0] + by_kind[-1]:
            return FreeRule(newest, base[number], by_kind)
    raise Different


def run_rule(ones: Sequence[Free | None], two: Sequence[Free | None]) -> FreeRule | None:
    """The rule of an event in runs that are alike, by its frees in them; None if there is none.

    `ones` are those of the models with one more layer, `two` those of both runs of the model with
    two more. Runs that are all the same are looked for first, then those that count from the first
    or the last.
    """
    rules = []
    for number, newest in enumerate((True, False)):
        here = {free[number] for free in ones if free is not None}
        there = [free[number] for free in two if free is not None]
        if len(here) == 1:
            (place,) = here
            by_layer, by_run = there[0] - place, there[-1] - there[0]
            by_kind = (by_layer,) * len(ones)
            rules.append((by_layer, FreeRule(newest, place - by_layer, by_kind, by_run)))
    found = [rule for _, rule in rules if not rule.by_run] + [
        rule for by_layer, rule in rules if not by_layer or rule.by_run == -by_layer
    ]
    return found[0] if found else None


def constant_rule(one: Free, two: Sequence[Free | None], *, kinds: int) -> FreeRule:
    """The rule of an event that frees the same place however many layers. Raises `Different`."""
    for number, newest in enumerate((True, False)):
        if all(free is not None and free[number] == one[number] for free in two):
            return FreeRule(newest, one[number], (0,) * kinds)
    raise Different
