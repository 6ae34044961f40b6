"""When the steps of a trial end: when enough of them were timed, or when none can win it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tuner.trial.base import MeasureOptions
from tuner.trial.rate import RunningMean

STEP_SCATTER = 1.5
"""How much faster than one step after the first a trial may turn out to be: kernels that are
still chosen, and a clock that is still rising. Only the first step was ever slower by more."""

VERIFIED_STEPS = 10
"""Timed steps of a verification at least: enough for an allocator that fragments to show it."""


class StopRule:
    """When the steps of a trial end: enough of them, or none can change the verdict.

    `device_bytes` tells the highest device memory so far.
    """

    def __init__(self, options: MeasureOptions, device_bytes: Callable[[], int]) -> None:
        self._options = options
        self._give_up = options.instructions.give_up
        self._read_bytes = device_bytes
        self._device_bytes = 0
        self._verdict: str | None = None
        self.warmup_steps = 0

    def ends_warm_up(self, samples: int, step_s: float) -> bool:
        """Whether timed steps begin after a step of the warm-up.

        The step is a whole one of `samples`, or what follows from a short one. Memory decides
        after the first one. Its time is of kernels that are loaded, so that one
        more step is timed before the trial ends, and the trial teaches speed too. From the
        second step on the time counts, with what steps are known to scatter.
        """
        self.warmup_steps += 1
        if self._give_up is not None:
            self._device_bytes = self._read_bytes()
            if self._give_up.is_too_large(self._device_bytes):
                self._verdict = "memory"
            elif self.warmup_steps > 1 and self._give_up.is_dominated(
                self._device_bytes, samples / step_s * STEP_SCATTER
            ):
                self._verdict = "dominated"
        enough = self.warmup_steps >= max(1, self._options.warmup_steps)
        return enough or self._verdict is not None

    def reason_to_stop(
        self, mean: RunningMean, samples: float, spent_s: float | None = None
    ) -> str | None:
        """Why no step is timed any more.

        `mean` is that of whole steps, of `samples` each. `spent_s` is what timing them has taken,
        where that is not their sum.
        """
        if self._verdict is not None:
            return self._verdict
        rates = mean.interval().rates(samples)
        if self._give_up is not None and rates is not None:
            dominated = self._give_up.is_dominated(self._device_bytes, rates[1])
            if dominated:
                return "dominated"
        return _reason_to_stop(mean, self._options, mean.total_s if spent_s is None else spent_s)


def thorough(options: MeasureOptions) -> MeasureOptions:
    """As `options`, for a verification: more steps, and as many of the longest lengths."""
    warmup_steps = options.warmup_steps
    if options.lengths == "data":  # the timed steps have others
        warmup_steps = max(warmup_steps, VERIFIED_STEPS)
    steps = max(options.min_steps, VERIFIED_STEPS)
    return replace(options, min_steps=steps, warmup_steps=warmup_steps)


def _reason_to_stop(mean: RunningMean, options: MeasureOptions, spent_s: float) -> str | None:
    interval = mean.interval()
    if interval.count < options.min_steps:
        return None
    if interval.relative_error <= options.relative_error:
        return "interval"
    return "budget" if spent_s >= options.budget_s else None
