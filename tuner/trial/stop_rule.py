"""Plans the micro-steps of a trial, times its steps, and decides when enough were timed.

An optimizer step of 32 micro-steps of several seconds is not timed as a whole: with one sequence
length, all micro-steps but the first do the same work. Its time is composed from short steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, NamedTuple

from tuner.trial.base import MeasureOptions

SHORT = 2
"""Micro-steps of a short step. Gradients are created in the first and accumulated in the second;
every later one starts with the same memory as the second, and has the same peak."""

SHORT_OF_DATA = 8
"""Micro-steps of a short step with the sequence lengths of the data: the second micro-step is not
representative of the others, so more are timed."""

LONG_STEP_S = 5.0
"""Shorter steps are always timed as a whole: they don't cost much."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The steps of a trial under `options`, whose whole steps have `micro_steps` micro-steps.

    The first step of the warm-up is a short one in every trial, so that the pace is known soon.
    """

    options: MeasureOptions
    micro_steps: int
    ranks: int = 1

    @property
    def whole_only(self) -> bool:
        """True if every step after the first must be a whole one.

        Several ranks exchange gradients in the last micro-step only, so no other micro-step is
        representative of it.
        """
        asked = self.options.whole_steps or self.options.instructions.verify
        return self.ranks > 1 or (asked and not self.options.short_steps)

    @property
    def first(self) -> int:
        """Micro-steps of the first step."""
        return min(self.micro_steps, SHORT)

    @property
    def warm_up(self) -> int:
        """Micro-steps of every later step of the warm-up."""
        return self.micro_steps if self.whole_only else self.first

    @property
    def full_micro_steps(self) -> int:
        """Micro-steps of the whole warm-up, which have the longest length."""
        return self.first + (max(1, self.options.warmup_steps) - 1) * self.warm_up

    def timed(self, step_s: float) -> int:
        """Micro-steps of each timed step, if a whole one takes `step_s`.

        Fewer than in a whole step if whole steps are long and the budget is too small for
        `min_steps` of them.
        """
        enough_s = max(LONG_STEP_S, self.options.budget_s / self.options.min_steps)
        if self.whole_only or (step_s <= enough_s and not self.options.short_steps):
            return self.micro_steps
        short = SHORT_OF_DATA if self.options.lengths == "data" else SHORT
        return min(self.micro_steps, short)

    def needed_s(self, step_s: float) -> float:
        """Seconds of all steps of the trial, the warm-up included, if a whole one takes `step_s`.

        The optimizer's update counts as part of the micro-steps.
        """
        micro_s = step_s / self.micro_steps
        timed_s = self.options.min_steps * self.timed(step_s) * micro_s
        return self.full_micro_steps * micro_s + max(self.options.budget_s, timed_s)


CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """The mean of `count` times in seconds, and half the width of its 95 % interval.

    `half_width_s` is infinite for a single time.
    """

    mean_s: float
    half_width_s: float
    count: int

    @property
    def relative_error(self) -> float:
        """Half the width over the mean."""
        return self.half_width_s / self.mean_s

    def rates(self, amount: float) -> tuple[float, float] | None:
        """Lower and upper end of `amount` per second; None where the interval reaches zero."""
        if not self.half_width_s < self.mean_s:
            return None
        low_s, high_s = self.mean_s - self.half_width_s, self.mean_s + self.half_width_s
        return amount / high_s, amount / low_s


class RunningMean:
    """Mean and variance of times that come one by one (Welford's recurrence)."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0

    @property
    def total_s(self) -> float:
        """The sum of all times."""
        return self._count * self._mean

    def add(self, time_s: float) -> None:
        """Take one time in."""
        self._count += 1
        distance = time_s - self._mean
        self._mean += distance / self._count
        self._squares += distance * (time_s - self._mean)

    def interval(self) -> MeanInterval:
        """Student's interval of the mean, as if each time were drawn independently.

        Needs one time at least.
        """
        degrees = self._count - 1
        if degrees == 0:
            return MeanInterval(self._mean, math.inf, self._count)
        error_s = math.sqrt(self._squares / degrees / self._count)
        return MeanInterval(self._mean, student_t(degrees) * error_s, self._count)


def student_t(degrees: int) -> float:
    """The two-sided quantile of Student's t distribution for `CONFIDENCE`.

    Exact for 1, 2 and 4 degrees of freedom, where the distribution function can be inverted;
    else the expansion in powers of 1 / degrees around the normal quantile (Abramowitz and
    Stegun, Handbook of Mathematical Functions, 26.7.5), which is 0.12 % low at 3 degrees and
    closer from there on.
    """
    p = (1 + CONFIDENCE) / 2
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    tail = 4 * p * (1 - p)
    if degrees == 2:
        return (2 * p - 1) * math.sqrt(2 / tail)
    if degrees == 4:
        root = math.sqrt(tail)
        return 2 * math.sqrt(math.cos(math.acos(root) / 3) / root - 1)
    x = NormalDist().inv_cdf(p)
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return math.fsum(term / float(degrees) ** power for power, term in enumerate(terms))


NEEDED_S = "needed_s"
"""The name of the fact that a trial reports after its first step: seconds for all its steps."""

STARTED_AGAIN = "started_again"
"""The name of the fact that a trial's process hung and was replaced: its time begins again."""

FIRST_STEP_WITHIN_S = 600.0
"""Time limit for loading and the first step, which has two micro-steps at most. A slower trial
hangs, or is too slow to be useful."""

SLACK = 2.0
"""A trial may take this many times the time estimated from its first step, usually its slowest."""

LONGEST_S = 3600.0
"""The longest time limit without a `timeout_s` of the user's."""


class Deadline:
    """The time limit of a trial that starts at `started_s` (`time.monotonic`).

    `timeout_s` is set by the user; None derives it from the trial's pace. `limit_s` is the current
    time limit.
    """

    def __init__(self, timeout_s: float | None, started_s: float) -> None:
        self._by_pace = timeout_s is None
        self._started_s = started_s
        self.limit_s = FIRST_STEP_WITHIN_S if timeout_s is None else timeout_s

    def hear(self, facts: Mapping[str, Any], now_s: float) -> None:
        """Take facts of the trial into account: its steps may need more time."""
        if STARTED_AGAIN in facts:
            self._started_s = now_s
        if self._by_pace and NEEDED_S in facts:
            needed_s = now_s - self._started_s + SLACK * float(facts[NEEDED_S])
            self.limit_s = min(max(self.limit_s, needed_s), LONGEST_S)

    def left_s(self, now_s: float) -> float:
        """Seconds until the time limit; negative after it."""
        return self._started_s + self.limit_s - now_s


STEP_SCATTER = 1.5
"""A trial may turn out this many times faster than one of its early steps: kernels are still being
chosen, and the clock is still rising. Only first steps were ever slower by more."""

VERIFIED_STEPS = 10
"""Timed steps of a verification at least: enough for an allocator that fragments to show it."""


class StopRule:
    """Ends the steps of a trial once there are enough, or no further step can change the verdict.

    `device_bytes` returns the highest device memory so far.
    """

    def __init__(self, options: MeasureOptions, device_bytes: Callable[[], int]) -> None:
        self._options = options
        self._give_up = options.instructions.give_up
        self._read_bytes = device_bytes
        self._device_bytes = 0
        self._verdict: str | None = None
        self.warmup_steps = 0

    def ends_warm_up(self, samples: int, step_s: float) -> bool:
        """Take one step of the warm-up; True if timed steps begin after it.

        `samples` and `step_s` are those of a whole step, or extrapolated from a short one. Memory
        is judged from the first step on. The time of that step includes loading kernels, so one
        more step is timed before the trial ends, and the trial gives a speed too. From the second
        step on, time is judged as well, with a tolerance of `STEP_SCATTER`.
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
        """The reason to stop timing steps; None to go on.

        `mean` is that of whole steps, of `samples` each. `spent_s` is the time spent on timing
        them, if it differs from their sum.
        """
        if self._verdict is not None:
            return self._verdict
        rates = mean.interval().rates(samples)
        if self._give_up is not None and rates is not None:
            dominated = self._give_up.is_dominated(self._device_bytes, rates[1])
            if dominated:
                return "dominated"
        spent_s = mean.total_s if spent_s is None else spent_s
        return _reason_to_stop(mean.interval(), self._options, spent_s)


def thorough(options: MeasureOptions) -> MeasureOptions:
    """`options` for a verification: more timed steps, and as many with the longest lengths."""
    warmup_steps = options.warmup_steps
    if options.lengths == "data":  # the timed steps have others
        warmup_steps = max(warmup_steps, VERIFIED_STEPS)
    steps = max(options.min_steps, VERIFIED_STEPS)
    return replace(options, min_steps=steps, warmup_steps=warmup_steps)


def _reason_to_stop(interval: MeanInterval, options: MeasureOptions, spent_s: float) -> str | None:
    if interval.count < options.min_steps:
        return None
    if interval.relative_error <= options.relative_error:
        return "interval"
    return "budget" if spent_s >= options.budget_s else None


class Amounts(NamedTuple):
    """Samples and tokens trained on so far; 0 if they aren't counted."""

    samples: float = 0.0
    tokens: float = 0.0


class StepTimer:
    """Times steps between reports; a report may be of several steps at once.

    The warm-up ends with the first report of at least `warmup_steps`. Times are of
    `time.monotonic`. `steps` and `total_s` are of the timed steps, as are `samples` and `tokens`
    where reports count them.
    """

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps = max(1, warmup_steps)
        self._last: tuple[float, float, Amounts] | None = None
        self._mean = RunningMean()
        self._is_warm = False
        self.steps = 0.0
        self.total_s = 0.0
        self.samples = 0.0
        self.tokens = 0.0

    def report(self, count: float, at_s: float, amounts: Amounts = Amounts()) -> None:  # noqa: B008
        """Note that `count` steps ended by `at_s`. A lower count starts anew (a new epoch)."""
        if not self._is_warm:
            self._is_warm = count >= self._warmup_steps
            self._last = (count, at_s, amounts) if self._is_warm else None
            return
        if self._last is None or count < self._last[0]:
            self._last = (count, at_s, amounts)
            return
        last_count, last_s, last_amounts = self._last
        steps, passed_s = count - last_count, at_s - last_s
        if steps <= 0 or passed_s <= 0:
            return  # painted again, or heard at the same moment: the next report covers it
        self._mean.add(passed_s / steps)
        self.steps += steps
        self.total_s += passed_s
        self.samples += amounts.samples - last_amounts.samples
        self.tokens += amounts.tokens - last_amounts.tokens
        self._last = (count, at_s, amounts)

    @property
    def interval(self) -> MeanInterval:
        """Seconds per step with their 95 % interval. Needs at least one timed report."""
        found = self._mean.interval()
        step_s = self.total_s / self.steps
        return MeanInterval(step_s, found.half_width_s, found.count)

    def reason_to_stop(self, options: MeasureOptions) -> str | None:
        """The reason to stop, "interval" or "budget"; None while more steps are needed."""
        return _reason_to_stop(self.interval, options, self.total_s) if self.steps else None
