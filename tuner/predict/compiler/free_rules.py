"""Which block each event of a deeper model frees, from those of models of a few layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Different(Exception):  # noqa: N818 - no error: a reason to trace all layers
    """The traces are not repetitions of one another."""


class Free(NamedTuple):
    """The place of a freed block among the live ones of its group."""

    from_newest: int
    from_oldest: int


class FreeRule(NamedTuple):
    """Which of the live blocks of its group a free is of, counted from the newest or the oldest.

    `first` in the base model, `by_kind` more for each further layer of a kind, and in the runs of
    layers `by_run` more from one run to the next.
    """

    newest: bool
    first: int
    by_kind: tuple[int, ...]
    by_run: int = 0

    def place(self, more: Sequence[int], run: int) -> int:
        """That of a model with so many more layers of each kind, in its run of this number."""
        by_layer = sum(each * number for each, number in zip(self.by_kind, more, strict=True))
        return self.first + by_layer + self.by_run * run


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
