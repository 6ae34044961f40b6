"""Predicted configurations that are worth a trial or a trace, and settings without an effect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np
from numpy.typing import NDArray

from tuner.core.records import Configuration, KnobValue, Prediction

Gains = Sequence[Sequence[float]]
"""One number a goal for each configuration, to be maximised; minus infinity for none."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The configurations at one end of their bounds: their gains, and which of them fit."""

    gains: Gains
    fits: Sequence[bool]


def undecided(best: Bound, worst: Bound) -> list[int]:
    """Places of configurations that may be on the front, the best of the first goal first.

    Each fits at its best, and isn't dominated by one that fits at its worst.
    """
    hopes, certain = (np.array(bound.gains, dtype=float) for bound in (best, worst))
    may_fit, surely = (np.array(bound.fits, dtype=bool) for bound in (best, worst))
    places = np.flatnonzero(may_fit & ~_dominated(hopes, certain[surely]))
    found: list[int] = places[np.argsort(-hopes[places, 0], kind="stable")].tolist()
    return found


def _dominated(hopes: NDArray[np.float64], certain: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Mask of rows (N, goals) that a row of `certain` (M, goals) dominates.

    It is enough to compare with the front of `certain`: dominance is transitive.
    """
    dominated = np.zeros(len(hopes), dtype=bool)
    left = certain[np.lexsort(-certain.T[::-1])]
    while len(left):
        best = left[0]
        dominated |= (hopes <= best).all(axis=1) & (hopes < best).any(axis=1)
        left = left[~(left <= best).all(axis=1)]
    return dominated


TOLERANCE = 1e-4
"""Largest relative difference of predictions that counts as none; predictions have no noise."""


@dataclass(frozen=True, slots=True)
class _InertKnob:
    """A knob whose values make no difference to memory or time.

    `beside` is another knob and those of its values where this holds; None where it holds
    everywhere. `compared` counts the groups of configurations that differ in this knob alone.
    """

    knob: str
    compared: int
    beside: tuple[str, tuple[KnobValue, ...]] | None = None

    def __str__(self) -> str:
        text = f"{self.knob} changes neither memory nor time"
        if self.beside is None:
            return text
        name, values = self.beside
        return f"{text} where {name} is {' or '.join(map(str, values))}"


def inert_knobs(
    configurations: Sequence[Configuration], predictions: Sequence[Prediction], knobs: Sequence[str]
) -> list[_InertKnob]:
    """The inert ones of `knobs`, from a prediction of each configuration.

    Only configurations that differ in one knob and in no other are compared; what is derived
    from the knobs may differ. A knob that is never the only difference is not judged.
    """
    numbers = np.array(
        [(p.memory.device_bytes, p.speed.step_s) for p in predictions], dtype=float
    ).reshape(-1, 2)
    # Each knob's values in the order of their first use, and (N, K) their numbers.
    values = {knob: list(dict.fromkeys(c[knob] for c in configurations)) for knob in knobs}
    number_of = {knob: {value: i for i, value in enumerate(of)} for knob, of in values.items()}
    coded = [[number_of[knob][c[knob]] for knob in knobs] for c in configurations]
    codes = np.array(coded, dtype=np.int64).reshape(len(configurations), len(knobs))
    found = []
    for column, knob in enumerate(knobs):
        others = np.delete(codes, column, axis=1)
        rows, equal = _groups(others, numbers)
        if len(rows) and equal.all():
            found.append(_InertKnob(knob, len(rows)))
            continue
        names = [name for name in knobs if name != knob]
        for place, name in enumerate(names):
            of_name = rows[:, place]
            # The values beside which every group is equal.
            inert = [int(code) for code in np.unique(of_name) if equal[of_name == code].all()]
            if inert:
                beside = (name, tuple(values[name][code] for code in inert))
                compared = int(np.isin(of_name, inert).sum())
                found.append(_InertKnob(knob, compared, beside))
    return found


def _groups(
    others: NDArray[np.int64], numbers: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Groups of two and more that agree in all other knobs, and whether their numbers do too."""
    if not len(others):
        return others, np.zeros(0, dtype=bool)
    rows, group, sizes = np.unique(others, axis=0, return_inverse=True, return_counts=True)
    low, high = (np.full((len(rows), 2), bound) for bound in (np.inf, -np.inf))
    np.minimum.at(low, group.ravel(), numbers)
    np.maximum.at(high, group.ravel(), numbers)
    equal = (high - low <= TOLERANCE * high).all(axis=1)
    several = sizes > 1
    return rows[several], equal[several]


NEAR_LIMIT = 0.05
"""Configurations are also tried if they exceed the usable memory by at most this fraction: the
prediction's error is as large."""


def shortlist(
    configurations: Sequence[Configuration], predictions: Sequence[Prediction], number: int
) -> list[Configuration]:
    """Up to `number` configurations, best first, from a prediction of each.

    In turn: the fastest that fit, the predicted front of throughput against memory from fast to
    small, and the fastest that are just too large. Configurations with equal numbers count once.
    """
    indices = sorted(
        range(len(predictions)),
        key=lambda i: (-predictions[i].speed.samples_per_s, predictions[i].memory.device_bytes, i),
    )
    fitting = [i for i in indices if predictions[i].fits]
    near = [
        i
        for i in indices
        if not predictions[i].fits
        and predictions[i].budget.fits(predictions[i].memory.device_bytes / (1 + NEAR_LIMIT))
    ]
    fastest = _without_twins(fitting, predictions)
    front = _front(fitting, predictions)
    every_third = chain.from_iterable((None, None, index) for index in near)
    turns = chain.from_iterable(zip_longest(fastest, front, every_third))
    chosen = dict.fromkeys(i for i in turns if i is not None)
    return [configurations[i] for i in list(chosen)[:number]]


def _without_twins(indices: Iterable[int], predictions: Sequence[Prediction]) -> list[int]:
    seen = set()
    kept = []
    for index in indices:
        prediction = predictions[index]
        numbers = (prediction.memory.device_bytes, f"{prediction.speed.samples_per_s:.6g}")
        if numbers not in seen:
            seen.add(numbers)
            kept.append(index)
    return kept


def _front(by_throughput: Sequence[int], predictions: Sequence[Prediction]) -> list[int]:
    front: list[int] = []
    smallest = None
    for index in by_throughput:
        size = predictions[index].memory.device_bytes
        if smallest is None or size < smallest:
            front.append(index)
            smallest = size
    return front
