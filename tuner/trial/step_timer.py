"""The time of a step, from reports of how many have ended by when."""

from __future__ import annotations

from typing import NamedTuple

from tuner.trial.base import MeasureOptions
from tuner.trial.rate import MeanInterval, RunningMean


class Amounts(NamedTuple):
    """What was trained on so far, in sums; 0 where nobody counts."""

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
        """`count` steps have ended by `at_s`. A lower count than before begins anew (an epoch)."""
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
        """Seconds of a step, with the 95 % interval that its reports leave. Needs one report."""
        found = self._mean.interval()
        step_s = self.total_s / self.steps
        return MeanInterval(step_s, found.half_width_s, found.count)

    def reason_to_stop(self, options: MeasureOptions) -> str | None:
        """Why no more steps are needed, "interval" or "budget"; None while they are."""
        if not self.steps or self.interval.count < options.min_steps:
            return None
        if self.interval.relative_error <= options.relative_error:
            return "interval"
        return "budget" if self.total_s >= options.budget_s else None
