"""Several trials of one configuration as one record: what all of them say together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median, stdev

from tuner.records import Measurement, Speed, Status, TrialRecord
from tuner.runner.rate import student_t

SAYS_NOTHING = (Status.CRASHED, Status.TIMEOUT, Status.INVALID, Status.INTERRUPTED)
"""A verification that ended like this takes nothing from what was measured before it."""


def combined(trials: Sequence[TrialRecord]) -> TrialRecord:
    """One record of trials of one configuration under the same circumstances.

    Speed is the median, memory the largest, the interval of the rate that of Student over the
    trials; the rest is the last one's. A trial that did not end well stands for all: what once
    ran out of memory is no safe choice. Only a verification that failed for a reason which says
    nothing of the configuration does not. What passed a verification once is verified.
    """
    telling = [t for t in trials if not (t.verification and t.outcome.status in SAYS_NOTHING)]
    telling = telling or list(trials)
    ended_badly = [t for t in telling if t.outcome.status is not Status.OK]
    if ended_badly:
        return ended_badly[-1]
    last = telling[-1]
    measured = [m for t in telling if (m := t.outcome.measurement) is not None]
    if len(measured) < 2:
        return last
    outcome = replace(last.outcome, measurement=_together(measured))
    return replace(last, outcome=outcome, verification=any(t.verification for t in telling))


def _together(trials: Sequence[Measurement]) -> Measurement:
    last = trials[-1]
    rates = [trial.speed.samples_per_s for trial in trials]
    return replace(
        last,
        memory=max((trial.memory for trial in trials), key=lambda memory: memory.device_bytes),
        speed=_sped_up(last.speed, median(rates) / last.speed.samples_per_s),
        samples_per_s_interval=_interval(rates),
        evaluation_peak_bytes=_largest(trial.evaluation_peak_bytes for trial in trials),
        checkpoint_bytes=_largest(trial.checkpoint_bytes for trial in trials),
        notes=(*last.notes, f"median of {len(trials)} trials"),
    )


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _sped_up(speed: Speed, factor: float) -> Speed:
    return Speed(
        step_s=speed.step_s / factor,
        it_per_s=speed.it_per_s * factor,
        samples_per_s=speed.samples_per_s * factor,
        tokens_per_s=speed.tokens_per_s * factor,
        mfu=None if speed.mfu is None else speed.mfu * factor,
        breakdown_s={kind: seconds / factor for kind, seconds in speed.breakdown_s.items()},
    )


def _interval(rates: Sequence[float]) -> tuple[float, float]:
    half = student_t(len(rates) - 1) * stdev(rates) / math.sqrt(len(rates))
    return fmean(rates) - half, fmean(rates) + half
