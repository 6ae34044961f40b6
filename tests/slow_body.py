"""A trial that takes longer than its first step may, and says so or does not."""

import os
import time
from pathlib import Path

from runner_bodies import CLOCK, measurement, obey_clock, set_ahead

from tuner.core.records import Configuration, Measurement
from tuner.trial import stop_rule as deadline
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.messages import Report

FIRST_STEP_WITHIN_S = 6.0
LONGER_S = 7.0


class Slow:
    """Says in the knob `needed_s` how long it needs; 0 says nothing."""

    def prepare(self, job: TrialJob, options: MeasureOptions) -> None:
        deadline.FIRST_STEP_WITHIN_S = FIRST_STEP_WITHIN_S
        obey_clock()

    def measure(
        self, job: TrialJob, configuration: Configuration, options: MeasureOptions, report: Report
    ) -> Measurement:
        clock = Path(os.environ[CLOCK])
        if not configuration["needed_s"]:
            set_ahead(clock, LONGER_S)
            time.sleep(600)
        report({deadline.NEEDED_S: configuration["needed_s"]})
        while not clock.exists():  # the test sets it when it has heard that
            time.sleep(0.01)
        time.sleep(0.5)  # so that it is looked at meanwhile
        return measurement()


BODY = Slow()
