"""Makes runners in the worker that runs them: small picklable objects, nothing imported before."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.trial.base import MeasureOptions, TrialJob, TrialRunner
from tuner.trial.isolated import IsolatedRunner


@dataclass(frozen=True, slots=True)
class MeasuredFactory:
    """Makes runners that train for real, each trial in a process of its own."""

    job: TrialJob
    options: MeasureOptions

    def __call__(self) -> TrialRunner:
        """See `RunnerFactory`."""
        return IsolatedRunner(self.job, self.options)


@dataclass(frozen=True, slots=True)
class EmulatedFactory:
    """Makes runners that train on an emulated machine with `gpus` GPUs; see `RunnerFactory`."""

    job: TrialJob
    options: MeasureOptions
    gpus: int = 1

    def __call__(self) -> TrialRunner:
        """See `RunnerFactory`. Raises `UnavailableError` where nothing can be emulated here."""
        from tuner.trial.emulated import EmulatedRunner

        return EmulatedRunner(self.job, self.options, gpus=self.gpus)
