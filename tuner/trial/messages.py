"""What a runner and the process that starts its trials tell each other, and nothing else.

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
"""Takes facts (JSON types) of a trial as it learns them; see `Ending.facts`."""


class TrialBody(Protocol):
    """What the processes of a runner do, apart from being processes."""

    def prepare(self, job: TrialJob, options: MeasureOptions) -> None:
        """Called once, in the process from which trials are forked: import what they need.

        Must leave this process with one thread and no device touched. Raises `TunerError` for
        what makes every trial of the job impossible.
        """

    def measure(
        self, job: TrialJob, configuration: Configuration, options: MeasureOptions, report: Report
    ) -> Measurement:
        """Called in the process of one trial. Whatever it raises is the trial's outcome."""


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
    """No trial can be run, and why."""

    error: TunerError


@dataclass(frozen=True, slots=True)
class Run:
    """Run one trial. Answered by `Reported`, any number of them, and one `Ended`."""

    configuration: Mapping[str, Any]
    instructions: Instructions = PLAIN


@dataclass(frozen=True, slots=True)
class Stop:
    """End the trial that runs; means nothing when none does."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What the trial reported of itself."""

    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """The trial and all its processes have ended, as far as they could be ended."""

    ending: Ending
