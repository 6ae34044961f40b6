"""Pareto fronts, and configurations that predictions cannot tell apart."""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tuner.core.records import Measurement, Prediction, Source, Status, TrialRecord


class Direction(enum.StrEnum):
    """The direction in which an objective improves."""

    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"


@dataclass(frozen=True, slots=True)
class Objective:
    """A number of a trial to maximize or minimize.

    `value` returns None for a trial that has no such number; such a trial is on no front.
    """

    name: str
    direction: Direction
    label: str
    value: Callable[[TrialRecord], float | None]

    def gain(self, record: TrialRecord) -> float | None:
        """The value with its sign changed, if necessary, so that larger is better."""
        value = self.value(record)
        if value is None:
            return None
        return value if self.direction is Direction.MAXIMIZE else -value


def samples_per_s(record: TrialRecord) -> float | None:
    """Training examples per second: measured if available, else emulated or predicted.

    This, and not tokens per second, decides how long an epoch takes: longer sequences raise
    the tokens per second and make the epoch longer.
    """
    evidence = record.outcome.evidence
    return evidence.speed.samples_per_s if evidence else None


def device_bytes(record: TrialRecord) -> int | None:
    """Peak device memory in bytes: measured if available, else emulated or predicted."""
    evidence = record.outcome.evidence
    return evidence.memory.device_bytes if evidence else None


def evidence_of(record: TrialRecord) -> Prediction | Measurement:
    """The numbers of a trial that fits: without any it would be on no front."""
    evidence = record.outcome.evidence
    assert evidence is not None
    return evidence


def rate_of(record: TrialRecord) -> float:
    """Throughput in samples/s of a trial that fits."""
    return evidence_of(record).speed.samples_per_s


def size_of(record: TrialRecord) -> int:
    """Peak device memory in bytes of a trial that fits."""
    return evidence_of(record).memory.device_bytes


def room_bytes(record: TrialRecord, memory_bytes: int) -> int:
    """Memory of a rank of the trial, in bytes, on a device with `memory_bytes`."""
    return min(memory_bytes, record.budget.limit_bytes)


def fastest_first(record: TrialRecord) -> tuple[float, int, str]:
    """Sort key: the fastest first, then the one with less memory."""
    return -(samples_per_s(record) or 0.0), device_bytes(record) or 0, record.configuration.key


THROUGHPUT = Objective("samples_per_s", Direction.MAXIMIZE, "throughput (samples/s)", samples_per_s)
DEVICE_MEMORY = Objective(
    "device_bytes", Direction.MINIMIZE, "peak device memory (bytes)", device_bytes
)
DEFAULT_OBJECTIVES = (THROUGHPUT, DEVICE_MEMORY)


def fits_within(record: TrialRecord, limit_bytes: int) -> bool:
    """True for a successful trial whose memory plus margin is within `limit_bytes`.

    `limit_bytes` is the memory of the GPU asked about, which may be less than that of the
    GPU the trial was for.
    """
    used_bytes = device_bytes(record)
    if record.outcome.status is not Status.OK or used_bytes is None:
        return False
    check = record.verified_by
    if check is not None and check.outcome.ran is not None and not fits_within(check, limit_bytes):
        return False
    return record.fits and used_bytes <= limit_bytes - record.budget.margin_bytes


def trusted(records: Iterable[TrialRecord], limit_bytes: int) -> list[TrialRecord]:
    """The records to choose from: measured ones if one fits, else emulated ones likewise, or all.

    A measurement outweighs predictions: if a measured record fits, only measured records are
    recommended or put on a front. Emulated records outweigh predicted ones in the same way.
    """
    found = list(records)
    for source in (Source.MEASURED, Source.EMULATED):
        alike = [record for record in found if record.source is source]
        if any(fits_within(record, limit_bytes) for record in alike):
            return alike
    return found


def pareto_front(
    records: Iterable[TrialRecord], *, objectives: Sequence[Objective] = DEFAULT_OBJECTIVES
) -> tuple[TrialRecord, ...]:
    """The trials that fit their own GPU and that no other trial dominates; see `unbeaten`."""
    fitting = (record for record in records if fits_within(record, record.gpu_memory_bytes))
    return unbeaten(fitting, objectives)


def unbeaten(
    records: Iterable[TrialRecord], objectives: Sequence[Objective]
) -> tuple[TrialRecord, ...]:
    """The trials that no other one dominates, best in the first objective first.

    A trial dominates another if it is at least as good in every objective and better in one.
    Of trials with equal numbers only the one with the smallest configuration key is kept, so the
    result does not depend on the order of the records.
    """
    candidates: list[tuple[tuple[float, ...], TrialRecord]] = []
    for record in records:
        gains = tuple(g for o in objectives if (g := o.gain(record)) is not None)
        if len(gains) == len(objectives):
            candidates.append((gains, record))
    # In this order, no record can be dominated by a later one: one pass is enough.
    candidates.sort(key=lambda c: ([-g for g in c[0]], c[1].configuration.key, c[1].trial_id))
    front: list[tuple[tuple[float, ...], TrialRecord]] = []
    for gains_, record in candidates:
        # The last one kept is best in the second objective: with two, checking it is enough.
        if not any(all(map(operator.ge, kept, gains_)) for kept, _ in reversed(front)):
            front.append((gains_, record))
    return tuple(record for _, record in front)


def hypervolume(records: Iterable[TrialRecord], *, reference: tuple[float, float]) -> float:
    """The area that the front of throughput and memory covers, up to the `reference` values.

    Exact, in samples/s x bytes. `reference` is the worst value of each that still counts, for
    example (0, the GPU's memory).
    """
    turned = [
        value if objective.direction is Direction.MAXIMIZE else -value
        for value, objective in zip(reference, DEFAULT_OBJECTIVES, strict=True)
    ]
    area, covered = 0.0, 0.0
    for record in pareto_front(records):
        gains = [objective.gain(record) for objective in DEFAULT_OBJECTIVES]
        first, second = ((g or 0.0) - r for g, r in zip(gains, turned, strict=True))
        if first <= 0 or second <= covered:
            continue
        # The front is sorted by the first objective, best first, so each record adds the strip
        # of the second objective that the records before it left uncovered.
        area += first * (second - covered)
        covered = second
    return area


PAIR_ERROR = 0.10
"""Error of the predicted ratio of two configurations of one space and GPU, as a logarithm. Both
are off in the same direction, so it is less than the error of each. For 90 % of 287 pairs of
published runs that share model, program, GPU and machine, and do not wait for their host, it is
smaller; `python -m benchmarks.accuracy` prints it, and how many pairs are in the wrong order."""
UNDECIDED = "not clearly faster than the next smaller one: within prediction error"
"""Meaning of the mark of an undecided configuration."""
LEAST_DIFFERENCE = 0.01
"""Configurations predicted to differ by less than this share are not worth separate trials: two
measurements of the same configuration differ by as much."""
MOST_MEASURED = 3


def may_be_as_fast(slower: TrialRecord, faster: TrialRecord) -> bool:
    """True if `slower` may be as fast as `faster`: their intervals of throughput overlap."""
    return _ends(slower)[1] >= _ends(faster)[0]


def undecided(front: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """The configurations of a front that may be no faster than the next smaller one.

    `front` is sorted from the least memory to the most.
    """
    return tuple(
        larger for smaller, larger in itertools.pairwise(front) if may_be_as_fast(smaller, larger)
    )


def rivals(best: TrialRecord, fitting: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Trials that may be as fast as the best, fastest first; empty if the best was measured."""
    if best.source is Source.MEASURED:
        return ()
    others = [r for r in fitting if r is not best and rate_of(r) > 0]
    found = [r for r in others if may_be_as_fast(r, best)]
    return tuple(sorted(found, key=fastest_first))


def worth_measuring(best: TrialRecord, others: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """The best and the rivals that are worth measuring against it; empty without such rivals."""
    chosen = [best]
    for other in others:
        apart = [abs(math.log(rate_of(other) / rate_of(record))) for record in chosen]
        if len(chosen) < MOST_MEASURED and min(apart) > LEAST_DIFFERENCE:
            chosen.append(other)
    return tuple(chosen) if len(chosen) > 1 else ()


def _ends(record: TrialRecord) -> tuple[float, float]:
    measured = record.outcome.measurement
    rate = rate_of(record)
    if measured is not None:
        return measured.samples_per_s_interval or (rate, rate)
    half = math.exp(PAIR_ERROR / 2)
    return rate / half, rate * half
