"""The messages between a runner and the process that starts its trials.

Both are the same program of the same user, so the messages travel as `multiprocessing` sends
them (pickled), over a socket that only the two hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tuner.core.errors import TunerError
from tuner.core.outcome import Ending
from tuner.core.records import Configuration, Measurement
from tuner.trial.base import PLAIN, Instructions, MeasureOptions, TrialJob

Report = Callable[[Mapping[str, Any]], None]
"""Called with new facts (JSON types) of a trial; see `Ending.facts`."""


class TrialBody(Protocol):
    """The work that the processes of a runner do."""

    def prepare(self, job: TrialJob, options: MeasureOptions) -> None:
        """Called once, in the process from which trials are forked: import what they need.

        Must start no thread of Python's, and must not touch a device. Raises `TunerError`
        if no trial of the job can run.
        """

    def measure(
        self, job: TrialJob, configuration: Configuration, options: MeasureOptions, report: Report
    ) -> Measurement:
        """Called in the process of one trial. An exception is the trial's outcome."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what to prepare. `body` is "package.module:object", a `TrialBody`.

    `python_path` is the value of PYTHONPATH that trials are to see.
    """

    job: TrialJob
    options: MeasureOptions
    body: str
    python_path: str | None


@dataclass(frozen=True, slots=True)
class Ready:
    """Trials can be run."""


@dataclass(frozen=True, slots=True)
class CannotRun:
    """No trial can be run; `error` is the reason."""

    error: TunerError


@dataclass(frozen=True, slots=True)
class Run:
    """Run one trial. Answered by `Reported`, any number of them, and one `Ended`."""

    configuration: Mapping[str, Any]
    instructions: Instructions = PLAIN


@dataclass(frozen=True, slots=True)
class Stop:
    """End the running trial; ignored if none runs."""


@dataclass(frozen=True, slots=True)
class Reported:
    """Facts that the trial reported."""

    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """The trial and all its processes have ended, as far as they could be ended."""

    ending: Ending
