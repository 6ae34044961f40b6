"""Which of two configurations is faster, where predictions cannot tell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from tuner.core.records import Source, TrialRecord
from tuner.searches.front import fastest_first, samples_per_s

PAIR_ERROR = 0.10
"""By how much predictions of two configurations of one space and GPU may be wrong apart, as a
logarithm: they are off alike, so that it is less than what each is off by. Of 287 pairs of
published runs that share model, program, GPU and machine, and do not wait for their host, 90 %
differ by less; `python -m benchmarks.accuracy` prints it, and how many are in the wrong order."""
UNDECIDED = (
    f"may be no faster than the next smaller: predicted within {PAIR_ERROR:.0%}, or intervals meet"
)
"""What the mark of such a configuration means."""
LEAST_DIFFERENCE = 0.01
"""What is predicted to be closer than this, relatively, is not worth trials of its own: a
configuration measured twice differs by as much."""
MOST_MEASURED = 3


def may_be_as_fast(slower: TrialRecord, faster: TrialRecord) -> bool:
    """Whether it is not certain that `faster` is: measured rates, or predictions, overlap."""
    return _ends(slower)[1] >= _ends(faster)[0]


def undecided(front: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """The configurations of a front that may be no faster than the next smaller one.

    `front` goes from the least memory to the most. One that is no faster is not on the front.
    """
    return tuple(
        larger for smaller, larger in itertools.pairwise(front) if may_be_as_fast(smaller, larger)
    )


def rivals(best: TrialRecord, fitting: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Those that may be as fast as the best, fastest first; none where it was measured."""
    if best.source is Source.MEASURED:
        return ()
    others = [r for r in fitting if r is not best and _rate(r) > 0]
    found = [r for r in others if may_be_as_fast(r, best)]
    return tuple(sorted(found, key=fastest_first))


def worth_measuring(best: TrialRecord, others: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """The best and those of its rivals between which trials are to decide; empty without any."""
    chosen = [best]
    for other in others:
        apart = [abs(math.log(_rate(other) / _rate(record))) for record in chosen]
        if len(chosen) < MOST_MEASURED and min(apart) > LEAST_DIFFERENCE:
            chosen.append(other)
    return tuple(chosen) if len(chosen) > 1 else ()


def _ends(record: TrialRecord) -> tuple[float, float]:
    measured = record.outcome.measurement
    rate = _rate(record)
    if measured is not None:
        return measured.samples_per_s_interval or (rate, rate)
    half = math.exp(PAIR_ERROR / 2)
    return rate / half, rate * half


def _rate(record: TrialRecord) -> float:
    rate = samples_per_s(record)
    assert rate is not None  # only of trials that fit
    return rate
