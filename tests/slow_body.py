"""A trial that takes longer than its first step may, and says so or does not."""

from __future__ import annotations

import time

from runner_bodies import measurement

from tuner.records import Configuration, Measurement
from tuner.runner import deadline
from tuner.runner.base import MeasureOptions, TrialJob
from tuner.runner.messages import Report

FIRST_STEP_WITHIN_S = 6.0
LONGER_S = 7.0


class Slow:
    """Says in the knob `needed_s` how long it needs; 0 says nothing."""

    def prepare(self, job: TrialJob, options: MeasureOptions) -> None:
        deadline.FIRST_STEP_WITHIN_S = FIRST_STEP_WITHIN_S

    def measure(
        self, job: TrialJob, configuration: Configuration, options: MeasureOptions, report: Report
    ) -> Measurement:
        if configuration["needed_s"]:
            report({deadline.NEEDED_S: configuration["needed_s"]})
        time.sleep(LONGER_S)
        return measurement()


BODY = Slow()
