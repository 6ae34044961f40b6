"""Trials without a GPU: the configuration's own training step, traced and timed by a model.

A simulated trial ends as a real one would: `ok` with its numbers, or `oom` when the device
memory it needs exceeds the GPU's. All its numbers are predictions and say so.
"""

from __future__ import annotations

import dataclasses
import time

from tuner.errors import InputError
from tuner.estimators.predict import predict, resolve_subject
from tuner.records import Configuration, Outcome, Source, Status
from tuner.runner.base import PLAIN, Instructions, TrialJob


class SimulatedRunner:
    """Runs trials of one job by tracing them on the meta device. One model is resolved once."""

    source = Source.PREDICTED

    def __init__(self, job: TrialJob) -> None:
        self._job = job
        assert job.model is not None  # what has no model is measured only
        self._subject = resolve_subject(job.workload, job.model)

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        """Trace `configuration`; see `TrialRunner.run`."""
        started = time.perf_counter()
        try:
            prediction = predict(
                self._subject,
                configuration,
                self._job.gpu,
                margin_fraction=self._job.margin_fraction,
                profile=self._job.profile,
            )
        except InputError as error:
            return Outcome(
                Status.INVALID, message=str(error), duration_s=time.perf_counter() - started
            )
        outcome = Outcome.predicted(prediction)
        return dataclasses.replace(outcome, duration_s=time.perf_counter() - started)
