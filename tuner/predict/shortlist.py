"""Selects the configurations of a predicted space that are worth a trial."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

from tuner.core.records import Configuration, Prediction

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
    near = [i for i in indices if _slightly_too_large(predictions[i])]
    fastest = _without_twins(fitting, predictions)
    front = _front(fitting, predictions)
    turns = chain.from_iterable(zip_longest(fastest, front, _every_third(near)))
    chosen = dict.fromkeys(i for i in turns if i is not None)
    return [configurations[i] for i in list(chosen)[:number]]


def _slightly_too_large(prediction: Prediction) -> bool:
    return not prediction.fits and prediction.budget.fits(
        prediction.memory.device_bytes / (1 + NEAR_LIMIT)
    )


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


def _every_third(indices: Sequence[int]) -> list[int | None]:
    """The indices with two gaps before each, so that only every third turn takes one."""
    return list(chain.from_iterable((None, None, index) for index in indices))
