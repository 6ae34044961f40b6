"""The worker's side: one Ray actor keeps one warm runner and runs trial after trial."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray import tune

from tuner.core.environment import trial_environment
from tuner.core.errors import TunerError, UnavailableError
from tuner.core.records import Configuration, Outcome, Status
from tuner.trial.base import PLAIN, Instructions, RunnerFactory, TrialRunner
from tuner.trial.preflight import says_device_is_lost

REQUEST = "request"
"""Key under which the index of a trial's search travels to the worker; 0 where it is missing."""
CONFIGURATION = "configuration"
"""Key under which a trial's configuration travels."""
INSTRUCTIONS = "instructions"
"""Key under which its `Instructions` travel, where there are any."""
OUTCOME = "outcome"
"""Key under which a trial's `Outcome` comes back."""
UNFIT = "unfit"
"""Key under which a `TunerError` comes back: why this worker can run no trial."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What the workers of one search need: who runs their trials, and with how many threads."""

    runner_factory: RunnerFactory
    threads: int = 1


class TrialTrainable(tune.Trainable):  # type: ignore[misc]
    """A trial is one step of this trainable, and `reset_config` puts in the next trial.

    Trials that end, however they end, report an outcome: an error would cost the actor, and
    with it the warm runner. A worker that can run no trial says so, and then keeps what Ray gave
    it until it is killed: freed, a wrong or broken GPU would get trial after trial.
    """

    plans: Sequence[WorkerPlan] = ()
    """Those of the searches by their index; see `trainable_of`."""

    def setup(self, config: dict[str, Any]) -> None:
        """Take the first configuration, and settle how many threads torch will take.

        The runner is built by the first step: Ray cannot end an actor quickly while this runs, and
        importing torch takes seconds.
        """
        self._index: int | None = None
        self._runner: TrialRunner | None = None
        self._is_unfit = False
        self._take(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next configuration. Always possible; False would fail the trial."""
        self._take(new_config)
        return True

    def _take(self, config: dict[str, Any]) -> None:
        index = config.get(REQUEST, 0)
        if index != self._index:  # Ray keeps workers of searches apart; a runner is never shared
            self.cleanup()
            self._runner, self._index = None, index
            os.environ.update(trial_environment(self.plans[index].threads))
        self._configuration = Configuration(config[CONFIGURATION])
        self._instructions: Instructions = config.get(INSTRUCTIONS, PLAIN)

    def step(self) -> dict[str, Any]:
        """Run the trial; reports its outcome, or why no trial can be run here."""
        if self._is_unfit:
            threading.Event().wait()
        try:
            return {"done": True, OUTCOME: self._outcome()}
        except TunerError as error:
            self._is_unfit = True
            return {UNFIT: error}

    def cleanup(self) -> None:
        """Let the runner end what it keeps; Ray calls this when the actor is to go."""
        close = getattr(self._runner, "close", None)
        if close is not None:
            close()

    def _outcome(self) -> Outcome:
        """The outcome of the trial. Raises `TunerError` where none can be run here."""
        assert self._index is not None
        try:
            if self._runner is None:
                self._runner = self.plans[self._index].runner_factory()
            outcome = self._timed(self._runner)
        except TunerError:
            raise
        except Exception as error:
            if says_device_is_lost(str(error)):
                raise _lost_device(str(error)) from error
            raise
        if outcome.status is Status.CRASHED and says_device_is_lost(outcome.message or ""):
            raise _lost_device(outcome.message or "")
        return outcome

    def _timed(self, runner: TrialRunner) -> Outcome:
        """The outcome of the trial, with the time it took where the runner gives none."""
        started_s = time.perf_counter()
        outcome = runner.run(self._configuration, self._instructions)
        if outcome.duration_s:
            return outcome
        return dataclasses.replace(outcome, duration_s=time.perf_counter() - started_s)


def trainable_of(plans: Sequence[WorkerPlan]) -> type[TrialTrainable]:
    """The trainable of searches with these plans, which travel with its class.

    `tune.with_parameters` would put them into Ray's store of objects. Once an object of a lost
    raylet is to be recovered, Ray ends this process at once, without a word (Ray 2.60).
    """

    class PlannedTrainable(TrialTrainable):
        pass

    PlannedTrainable.plans = plans
    return PlannedTrainable


def _lost_device(text: str) -> UnavailableError:
    return UnavailableError(
        f"a GPU of {socket.gethostname()} is lost: {text}",
        hint="the driver's log says more (`dmesg | grep -i xid`); a reset or a reboot may bring "
        "it back; then continue the same search",
    )
