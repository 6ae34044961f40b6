"""What a search has come to so far, in numbers that are followed record by record."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.core.records import Configuration, Status, TrialRecord
from tuner.searches.front import device_bytes, hypervolume, pareto_front, samples_per_s
from tuner.searches.journal import latest


@dataclass(frozen=True, slots=True)
class Numbers:
    """What there is to show of a search at one moment.

    `hypervolume` is of the front of throughput and memory, in samples/s x bytes, with 0 and the
    GPU's memory as its reference. `best_samples_per_s` and `best_device_bytes` are of the fastest
    that fits, None before there is one; `oom_share` is of all trials, None before the first.
    """

    trials: int
    oom_share: float | None
    best_samples_per_s: float | None
    best_device_bytes: int | None
    hypervolume: float
    front_size: int


class RunningSummary:
    """Follows the records of one GPU type.

    Taking a record in costs the same however many there were; the front is worked out when it is
    asked for, from the front before and what came since.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._runs: dict[Configuration, list[TrialRecord]] = {}
        self._fitting: dict[Configuration, TrialRecord] = {}
        self._new: list[TrialRecord] = []
        self._front: tuple[TrialRecord, ...] = ()
        self._again = False
        self._trials = self._oom = 0

    def add(self, record: TrialRecord) -> None:
        """Take in a record; several of one configuration count together, as in the results."""
        self._trials += 1
        self._oom += record.outcome.status is Status.OOM
        runs = self._runs.setdefault(record.configuration, [])
        runs.append(record)
        (together,) = latest(runs)
        before = self._fitting.pop(record.configuration, None)
        if together.fits:
            self._fitting[record.configuration] = together
            self._new.append(together)
        # What this configuration kept off the front may come back.
        self._again = self._again or before is not None

    def numbers(self) -> Numbers:
        """Where the search stands."""
        changed = self._fitting.values() if self._again else (*self._front, *self._new)
        if self._again or self._new:
            self._front = pareto_front(changed, limit_bytes=self._limit_bytes)
            self._new, self._again = [], False
        best = self._front[0] if self._front else None
        return Numbers(
            trials=self._trials,
            oom_share=self._oom / self._trials if self._trials else None,
            best_samples_per_s=samples_per_s(best) if best else None,
            best_device_bytes=device_bytes(best) if best else None,
            hypervolume=hypervolume(self._front, reference=(0.0, float(self._limit_bytes))),
            front_size=len(self._front),
        )
