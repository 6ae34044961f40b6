"""When a trial is given up: after the time that the user sets, else by the pace of its first step.

A trial of many long steps takes longer than one that hangs should be waited for. So the time is
short until the first step has ended, and long enough for all steps from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEEDED_S = "needed_s"
"""The fact by which a trial says, after its first step, how long all its steps may take."""

FIRST_STEP_WITHIN_S = 600.0
"""For loading and the first step, of two micro-steps at most: what takes longer hangs, or is no
training that anybody would wait for."""

SLACK = 2.0
"""How much slower than its first step says a trial may be. That one is the slowest, as a rule."""

LONGEST_S = 3600.0
"""No trial runs longer by itself."""


class Deadline:
    """When the trial that starts at `started_s` (`time.monotonic`) is given up.

    `timeout_s` is the user's own; None leaves it to the trial's pace. `limit_s` is the time that
    the trial has, as is known so far.
    """

    def __init__(self, timeout_s: float | None, started_s: float) -> None:
        self._by_pace = timeout_s is None
        self._started_s = started_s
        self.limit_s = FIRST_STEP_WITHIN_S if timeout_s is None else timeout_s

    def hear(self, facts: Mapping[str, Any], now_s: float) -> None:
        """Take facts of the trial into account: what its steps need may be more time."""
        if self._by_pace and NEEDED_S in facts:
            needed_s = now_s - self._started_s + SLACK * float(facts[NEEDED_S])
            self.limit_s = min(max(self.limit_s, needed_s), LONGEST_S)

    def left_s(self, now_s: float) -> float:
        """Seconds until then; negative after it."""
        return self._started_s + self.limit_s - now_s
