"""What the trials so far leave open: who cannot win, who is tied, who is to be verified.

Everything here is decided by the records alone, so that a search that goes on after an
interruption decides as it would have done without one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from tuner.records import Configuration, Measurement, TrialRecord
from tuner.results.front import pareto_front
from tuner.results.journal import latest
from tuner.runner.base import GiveUp

MOST_RUNS = 3
"""Of one configuration: what is tied after three runs is the same for all that it matters."""

REPEAT_SHARE = 0.1
"""Part of the trials, the last ones, that near-ties may take from configurations untried."""

MOST_FAILED_VERIFICATIONS = 5
"""When so many of the best fail, another reason than the configuration is likely."""


def give_up_rule(records: Iterable[TrialRecord], usable_bytes: int) -> GiveUp:
    """When a trial that starts now is to be given up: the measured front, at its slowest."""
    front = pareto_front(record for record in latest(records) if _measurement(record))
    return GiveUp(usable_bytes, tuple((_size(record), _ends(record)[0]) for record in front))


def near_tie(records: Sequence[TrialRecord]) -> Configuration | None:
    """What is to run again, because the front is not decided; None when it is.

    Two are tied when the intervals of their measured throughput overlap: neighbours on the
    front, of which the larger may not be faster at all, and whatever may be as fast as the
    fastest. The one with fewer runs goes first, then the faster one.
    """
    runs = Counter(record.configuration for record in records)
    fitting = [r for r in latest(records) if r.fits and _interval(r) is not None]
    front = sorted(pareto_front(fitting), key=_size)
    if not front:
        return None
    pairs = list(itertools.pairwise(front))
    pairs += [(other, front[-1]) for other in fitting if other is not front[-1]]
    tied = {
        record.configuration: record
        for slower, faster in pairs
        if _ends(slower)[1] >= _ends(faster)[0]
        for record in (slower, faster)
        if runs[record.configuration] < MOST_RUNS
    }
    return min(tied, key=lambda c: (runs[c], -_rate(tied[c]), c.key), default=None)


def to_verify(records: Sequence[TrialRecord]) -> Configuration | None:
    """The fastest that fits, unless it is verified; None also when there is nothing to verify."""
    fitting = [r for r in latest(records) if r.fits and _measurement(r)]
    if not fitting:
        return None
    best = max(fitting, key=_rate).configuration
    tried = [record for record in records if record.verification]
    failed = sum(not record.verified for record in tried)
    was_tried = any(record.configuration == best for record in tried)
    return None if was_tried or failed >= MOST_FAILED_VERIFICATIONS else best


def _measurement(record: TrialRecord) -> Measurement | None:
    return record.outcome.measurement


def _interval(record: TrialRecord) -> tuple[float, float] | None:
    measurement = record.outcome.measurement
    return None if measurement is None else measurement.samples_per_s_interval


def _ends(record: TrialRecord) -> tuple[float, float]:
    return _interval(record) or (_rate(record), _rate(record))


def _rate(record: TrialRecord) -> float:
    evidence = record.outcome.evidence
    assert evidence is not None  # only of trials that fit
    return evidence.speed.samples_per_s


def _size(record: TrialRecord) -> int:
    evidence = record.outcome.evidence
    assert evidence is not None
    return evidence.memory.device_bytes
