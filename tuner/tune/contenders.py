"""What the trials so far leave open: who cannot win, who is tied, who is to be verified.

Everything here is decided by the records alone, so that a search that goes on after an
interruption decides as it would have done without one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from tuner.records import Configuration, Measurement, TrialRecord
from tuner.results.journal import latest
from tuner.runner.base import GiveUp

MOST_RUNS = 3
"""Of one configuration: what is tied after three runs is the same for all that it matters."""

REPEAT_SHARE = 0.1
"""Part of the trials, the last ones, that near-ties may take from configurations untried."""

MOST_FAILED_VERIFICATIONS = 5
"""When so many of the best fail, another reason than the configuration is likely."""


class Standing:
    """The records, and what they say of each configuration together, worked out once."""

    def __init__(self, records: Sequence[TrialRecord]) -> None:
        self.records = records
        self.fitting = [r for r in latest(records) if r.fits and _measurement(r) is not None]

    def front(self) -> list[TrialRecord]:
        """The measured ones that fit and are not dominated, the smallest first."""
        found: list[TrialRecord] = []
        for record in sorted(self.fitting, key=lambda r: (_size(r), -_rate(r))):
            if not found or _rate(record) > _rate(found[-1]):
                found.append(record)
        return found


def give_up_rule(standing: Standing, usable_bytes: int) -> GiveUp:
    """When a trial that starts now is to be given up: the measured front, at its slowest."""
    front = tuple((_size(record), _ends(record)[0]) for record in standing.front())
    return GiveUp(usable_bytes, front)


def near_tie(standing: Standing) -> Configuration | None:
    """What is to run again, because the front is not decided; None when it is.

    Two are tied when the intervals of their measured throughput overlap: neighbours on the
    front, of which the larger may not be faster at all, and whatever may be as fast as the
    fastest. The one with fewer runs goes first, then the faster one.
    """
    front = [record for record in standing.front() if _interval(record) is not None]
    if not front:
        return None
    runs = Counter(record.configuration for record in standing.records)
    fitting = [record for record in standing.fitting if _interval(record) is not None]
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


def to_verify(standing: Standing) -> Configuration | None:
    """The fastest that fits, unless it is verified; None also when there is nothing to verify."""
    if not standing.fitting:
        return None
    best = max(standing.fitting, key=_rate).configuration
    tried = [record for record in standing.records if record.verification]
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
