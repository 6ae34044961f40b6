"""The worker's side: one Ray actor keeps one warm runner and runs trial after trial."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

from ray import tune

from tuner.errors import TunerError
from tuner.records import Configuration, Outcome
from tuner.runner.base import PLAIN, Instructions, RunnerFactory, TrialRunner
from tuner.runner.environment import trial_environment

CONFIGURATION = "configuration"
"""Key under which a trial's configuration travels to the worker."""
INSTRUCTIONS = "instructions"
"""Key under which its `Instructions` travel, where there are any."""
OUTCOME = "outcome"
"""Key under which a trial's `Outcome` comes back."""
FAILURE = "failure"
"""Key under which a `TunerError` comes back that ends the search."""


class TrialTrainable(tune.Trainable):  # type: ignore[misc]
    """A trial is one step of this trainable, and `reset_config` puts in the next trial.

    Trials that end, however they end, report an outcome: an error would cost the actor, and
    with it the warm runner.
    """

    def setup(self, config: dict[str, Any], *, runner_factory: RunnerFactory, threads: int) -> None:
        """Take the first configuration, and settle how many threads torch will take.

        The runner is built by the first step: Ray cannot end an actor quickly while this
        runs, and importing torch takes seconds.
        """
        os.environ.update(trial_environment(threads))
        self._runner_factory = runner_factory
        self._runner: TrialRunner | None = None
        self._take(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next configuration. Always possible; False would fail the trial."""
        self._take(new_config)
        return True

    def _take(self, config: dict[str, Any]) -> None:
        self._configuration = Configuration(config[CONFIGURATION])
        self._instructions: Instructions = config.get(INSTRUCTIONS, PLAIN)

    def step(self) -> dict[str, Any]:
        """Run the trial; reports its outcome, or the error because of which none can run."""
        try:
            if self._runner is None:
                self._runner = self._runner_factory()
            return {"done": True, OUTCOME: self._timed(self._runner)}
        except TunerError as error:
            return {"done": True, FAILURE: error}

    def cleanup(self) -> None:
        """Let the runner end what it keeps; Ray calls this when the actor is to go."""
        close = getattr(self._runner, "close", None)
        if close is not None:
            close()

    def _timed(self, runner: TrialRunner) -> Outcome:
        """The outcome of the trial, with the time it took where the runner gives none."""
        started_s = time.perf_counter()
        outcome = runner.run(self._configuration, self._instructions)
        if outcome.duration_s:
            return outcome
        return dataclasses.replace(outcome, duration_s=time.perf_counter() - started_s)
