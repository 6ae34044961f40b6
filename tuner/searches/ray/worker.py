"""The worker's side: each Ray actor keeps one warm runner and runs trial after trial."""

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
"""Key of the index of a trial's search, sent to the worker; 0 if missing."""
CONFIGURATION = "configuration"
"""Key of a trial's configuration, sent to the worker."""
INSTRUCTIONS = "instructions"
"""Key of a trial's `Instructions`, sent to the worker; optional."""
OUTCOME = "outcome"
"""Key of a trial's `Outcome`, sent by the worker."""
UNFIT = "unfit"
"""Key of a `TunerError`, sent by a worker that can run no trial."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Plan of the workers of one search: the factory of their runners, and threads per trial."""

    runner_factory: RunnerFactory
    threads: int = 1


class TrialTrainable(tune.Trainable):  # type: ignore[misc]
    """A trainable with one trial per step; `reset_config` sets the next trial.

    Every trial that ends reports an outcome, because an error would end the actor and with it the
    warm runner. A worker that can run no trial reports this, and then keeps its resources until it
    is killed; otherwise a wrong or broken GPU would get trial after trial.
    """

    plans: Sequence[WorkerPlan] = ()
    """The plans of the searches, by their index; see `trainable_of`."""

    def setup(self, config: dict[str, Any]) -> None:
        """Take the first configuration, and set the number of torch's threads.

        The first step builds the runner, because importing torch takes seconds, and Ray cannot end
        an actor quickly during this method.
        """
        self._index: int | None = None
        self._runner: TrialRunner | None = None
        self._is_unfit = False
        self._take(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next configuration. Returns True; False would fail the trial."""
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
        """Run the trial; report its outcome, or the error why no trial can run here."""
        if self._is_unfit:
            threading.Event().wait()
        try:
            return {"done": True, OUTCOME: self._outcome()}
        except TunerError as error:
            self._is_unfit = True
            return {UNFIT: error}

    def cleanup(self) -> None:
        """Close the runner; Ray calls this when the actor ends."""
        close = getattr(self._runner, "close", None)
        if close is not None:
            close()

    def _outcome(self) -> Outcome:
        """The outcome of the trial. Raises `TunerError` if no trial can run here."""
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
        """The outcome of the trial, with the elapsed time if the runner gives none."""
        started_s = time.perf_counter()
        outcome = runner.run(self._configuration, self._instructions)
        if outcome.duration_s:
            return outcome
        return dataclasses.replace(outcome, duration_s=time.perf_counter() - started_s)


def trainable_of(plans: Sequence[WorkerPlan]) -> type[TrialTrainable]:
    """The trainable of searches with these plans, which are sent with its class.

    `tune.with_parameters` would put them into Ray's object store. When an object of a lost raylet
    must be recovered, Ray ends this process at once, without a message (Ray 2.60).
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
