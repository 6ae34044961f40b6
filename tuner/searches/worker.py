"""The worker's side: each Ray actor keeps one warm runner and runs trial after trial."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from dataclasses import dataclass

from tuner.core.environment import trial_environment
from tuner.core.errors import TunerError, UnavailableError
from tuner.core.records import Configuration, Outcome, Status
from tuner.trial.base import Instructions, RunnerFactory, TrialRunner, call_if_there
from tuner.trial.preflight import says_device_is_lost


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Plan of the workers of one search: their runners, threads per trial, folder and title."""

    runner_factory: RunnerFactory
    threads: int = 1
    folder: str = ""
    title: str = "trials"


class TrialWorker:
    """One process that runs trials of one search; an actor of Ray.

    A worker that can run no trial returns the error, and keeps its resources until it is killed:
    otherwise a wrong or broken GPU would get trial after trial.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._runner: TrialRunner | None = None

    def __repr__(self) -> str:
        return self._plan.title  # the dashboard shows it, and logs begin with it

    def prepare(self) -> TunerError | None:
        """Make the runner and let it import its libraries. Returns the error if no trial can run.

        Not in `__init__`: it takes seconds, and Ray can't end an actor quickly during that.
        """
        os.environ.update(trial_environment(self._plan.threads))
        with contextlib.suppress(OSError):  # where the node has it
            os.chdir(self._plan.folder)
        try:
            self._runner = self._plan.runner_factory()
            call_if_there(self._runner, "start")
        except TunerError as error:
            return error
        return None

    def run(self, configuration: Configuration, how: Instructions) -> Outcome | TunerError:
        """The outcome of a trial, or the error why no trial can run here."""
        assert self._runner is not None
        started_s = time.perf_counter()
        try:
            outcome = self._runner.run(configuration, how)
        except TunerError as error:
            return error
        except Exception as error:
            if says_device_is_lost(str(error)):
                return _lost_device(str(error))
            raise
        if outcome.status is Status.CRASHED and says_device_is_lost(outcome.message or ""):
            return _lost_device(outcome.message or "")
        if outcome.duration_s:
            return outcome
        return dataclasses.replace(outcome, duration_s=time.perf_counter() - started_s)

    def close(self) -> None:
        """Let the runner end what it keeps."""
        call_if_there(self._runner, "close")


def _lost_device(text: str) -> UnavailableError:
    return UnavailableError(
        f"a GPU of {socket.gethostname()} is lost: {text}",
        hint="the driver's log says more (`dmesg | grep -i xid`); a reset or a reboot may bring "
        "it back; then continue the same search",
    )
