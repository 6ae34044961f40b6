"""Plans the micro-steps of each step of a trial, and estimates the time of all of them.

An optimizer step of 32 micro-steps of several seconds is not timed as a whole: with one sequence
length, all micro-steps but the first do the same work. Its time is composed from short steps.
"""

from __future__ import annotations

from dataclasses import dataclass

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
