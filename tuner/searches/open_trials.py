"""The trials of a search without a record yet: those that run, wait, or run again.

Ray counts runs, a search counts trials: a trial whose worker was lost has a second run with another
Ray id, but stays one trial.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from dataclasses import dataclass

from tuner.core.records import Configuration, Outcome, TrialRecord
from tuner.core.records.trial import utc_now
from tuner.searches.request import SearchRequest
from tuner.trial.base import PLAIN, Instructions

RETRIES_OF_A_LOST_WORKER = 1
"""Extra runs of a trial that was killed or lost its worker: it likely causes a second loss."""
RETRIES_OF_A_LOST_NODE = 3
"""Extra runs of a trial whose node was lost. The trial is rarely the cause, but one that takes all
memory of a host can end nodes."""
STARTS_OF_A_TRIAL = 10
"""A trial is given up after this many runs that were lost before a worker began them. Such losses
reveal workers that died idle, as many at once as a node has."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """A trial to hand out. `number` counts trials from 1.

    `workers_lost` and `nodes_lost` count its runs that ended with such a loss. `unbegun` counts the
    runs that were lost before a worker began them, since the last one that a worker began.
    """

    configuration: Configuration
    instructions: Instructions = PLAIN
    number: int = 0
    workers_lost: int = 0
    nodes_lost: int = 0
    unbegun: int = 0

    @property
    def may_run_again(self) -> bool:
        """True unless too many of its runs were lost."""
        return (
            self.workers_lost <= RETRIES_OF_A_LOST_WORKER
            and self.nodes_lost <= RETRIES_OF_A_LOST_NODE
            and self.unbegun < STARTS_OF_A_TRIAL
        )


class OpenTrials:
    """Open trials by the ids of their runs; each is either handed out or waits to run again."""

    def __init__(self) -> None:
        self._runs: dict[str, Proposed] = {}
        self._begun_at: dict[str, str] = {}
        self._again: deque[Proposed] = deque()
        self._lost: deque[Proposed] = deque()
        self._configurations: Counter[Configuration] = Counter()
        self.handed_out = 0

    def __len__(self) -> int:
        return len(self._runs) + len(self._again) + len(self._lost)

    def __contains__(self, run: str) -> bool:
        return run in self._runs

    def __getitem__(self, run: str) -> Proposed:
        return self._runs[run]

    @property
    def on_workers(self) -> int:
        """Number of runs that have a worker or wait for one."""
        return len(self._runs)

    @property
    def running(self) -> int:
        """Number of runs that a worker has begun."""
        return len(self._begun_at)

    def is_waiting(self, run: str) -> bool:
        """True if no worker has begun the run."""
        return run not in self._begun_at

    def includes(self, configuration: Configuration) -> bool:
        """True if a trial of this configuration is handed out or waits to run again."""
        return self._configurations[configuration] > 0

    def hand_out(self, run: str, proposed: Proposed) -> None:
        """Note a new trial, and give it its number."""
        self.handed_out += 1
        self._runs[run] = dataclasses.replace(proposed, number=self.handed_out)
        self._configurations[proposed.configuration] += 1

    def hand_out_again(self, run: str, *, lost: bool = False) -> Proposed | None:
        """The trial that has waited longest to run again, or to after a loss; None without one."""
        queue = self._lost if lost else self._again
        if not queue:
            return None
        self._runs[run] = queue.popleft()
        return self._runs[run]

    def begin(self, run: str, begun_at: str) -> None:
        """Note that a worker has begun the run."""
        self._begun_at[run] = begun_at
        self._runs[run] = dataclasses.replace(self._runs[run], unbegun=0)

    def close(self, run: str) -> tuple[Proposed, str | None]:
        """Remove a trial that ended; return it with the time at which its last run began."""
        proposed = self._runs.pop(run)
        self._configurations[proposed.configuration] -= 1
        if not self._configurations[proposed.configuration]:
            del self._configurations[proposed.configuration]
        return proposed, self._begun_at.pop(run, None)

    def lose(self, run: str, *, with_node: bool) -> bool:
        """Note that the run was lost. True if the trial will run again, False if it must end.

        One that had begun runs again after all others.
        """
        proposed = self._runs[run]
        if run not in self._begun_at:
            proposed = dataclasses.replace(proposed, unbegun=proposed.unbegun + 1)
        elif with_node:
            proposed = dataclasses.replace(proposed, nodes_lost=proposed.nodes_lost + 1)
        else:
            proposed = dataclasses.replace(proposed, workers_lost=proposed.workers_lost + 1)
        self._runs[run] = proposed
        if proposed.may_run_again:
            began = self._begun_at.pop(run, None) is not None
            (self._lost if began else self._again).append(self._runs.pop(run))
        return proposed.may_run_again

    def take_back(self, run: str) -> None:
        """Let the trial run again, without counting a loss."""
        self._again.append(self._runs.pop(run))
        self._begun_at.pop(run, None)


def record_of(
    request: SearchRequest,
    proposed: Proposed,
    begun_at: str | None,
    outcome: Outcome,
    node: str | None = None,
) -> TrialRecord:
    """The record of a trial; `begun_at` is the time at which its last run began, None for now.

    An outcome without a prediction gets the request's prediction, if there is one.
    """
    configuration, trial_device = proposed.configuration, request.trial_device
    if outcome.prediction is None:
        known = request.predictions.get(configuration.key)
        outcome = dataclasses.replace(outcome, prediction=known)
    return TrialRecord.of(
        request.space.name,
        request.gpu,
        configuration,
        outcome,
        trial_id=f"{request.run_id}-{proposed.number:03d}",
        seed=request.options.seed,
        started_at=begun_at or utc_now(),
        versions=request.versions,
        searcher=request.options.searcher,
        run_id=request.run_id,
        device=trial_device.device if trial_device and not trial_device.emulated else None,
        emulated_device=trial_device.device if trial_device and trial_device.emulated else None,
        memory_limit_bytes=trial_device.memory_limit_bytes if trial_device else None,
        margin_bytes=request.margin_bytes if trial_device else None,
        verification=proposed.instructions.verify,
        node=node,
    )
