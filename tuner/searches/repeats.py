"""Combines several trials of one configuration into one record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tuner.core.kinds import SAYS_NOTHING
from tuner.core.records import Measurement, Status, TrialRecord


def pooled(runs: Sequence[TrialRecord]) -> TrialRecord:
    """One record of the runs of one configuration, in the order in which they ended.

    The last run decides the status: a verification that ran out of memory outweighs the trial
    before it. If the last run succeeded, times are averaged over all comparable runs, memory is the
    largest, and the record is a verification if any run was one. A single run is unchanged.
    """
    if len(runs) == 1:
        return runs[0]
    distinct: dict[str, TrialRecord] = {}
    for run in runs:  # a line is written again for another margin
        distinct.pop(run.trial_id, None)
        distinct[run.trial_id] = run
    every = list(distinct.values())
    telling = [r for r in every if not (r.verification and r.outcome.status in SAYS_NOTHING)]
    last = (telling or every)[-1]
    alike = [run for run in telling if run.outcome.status is Status.OK and run.alike(last)]
    ran = [found for run in alike if (found := run.outcome.ran) is not None]
    if last.outcome.status is not Status.OK or len(ran) < 2:
        return last
    return replace(
        last,
        outcome=last.outcome.with_ran(_together(ran)),
        verification=any(run.verification for run in alike),
    )


def _together(runs: Sequence[Measurement]) -> Measurement:
    steps = sum(run.steps for run in runs)
    step_s = sum(run.steps * run.speed.step_s for run in runs) / steps
    last = runs[-1]
    speed = last.speed.slowed(step_s / last.speed.step_s)
    return replace(
        last,
        memory=max((run.memory for run in runs), key=lambda memory: memory.device_bytes),
        speed=speed,
        steps=steps,
        samples_per_s_interval=_interval(runs, speed.samples_per_s),
        evaluation_peak_bytes=_largest(run.evaluation_peak_bytes for run in runs),
        checkpoint_bytes=_largest(run.checkpoint_bytes for run in runs),
    )


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _interval(runs: Sequence[Measurement], rate: float) -> tuple[float, float] | None:
    """The interval of the mean rate: from steps within runs, and at least the range of runs."""
    known = [run.samples_per_s_interval for run in runs if run.samples_per_s_interval]
    if not known:
        return None
    within = math.sqrt(sum(((high - low) / 2) ** 2 for low, high in known)) / len(known)
    rates = [run.speed.samples_per_s for run in runs]
    half = max(within, (max(rates) - min(rates)) / 2)
    return rate - half, rate + half
