"""Ray Tune's side of searches: searcher, scheduler, stopper and callback over their states."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune import Callback, Stopper
from ray.tune.experiment import Trial
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from tuner.core.environment import masked, secret_values
from tuner.core.records import Outcome
from tuner.searches.ray.private import (
    LOOK_PERIOD_S,
    RayLostError,
    is_own,
    require_alive,
    use_actor_cache,
)
from tuner.searches.ray.rooms import ConcurrentSearches
from tuner.searches.ray.worker import CONFIGURATION, INSTRUCTIONS, OUTCOME, REQUEST, UNFIT

NODE_DIED = "its node has died"
"""In the text of Ray's `ActorDiedError` where not only the worker was lost."""


class StateSearcher(Searcher):  # type: ignore[misc]
    """Gives Ray the configurations that the states propose.

    Nothing comes back this way: `StateCallback` sees each result first. The state is not
    saved, as a search is resumed from the trial journal and never from Ray's own files.
    """

    def __init__(self, searches: ConcurrentSearches) -> None:
        super().__init__()
        self._searches = searches

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next run, `FINISHED`, or None while that is not known.

        A trial can lose its worker as long as it runs, so that nothing is finished before.
        """
        self._searches.report()  # Ray may wait here, where nothing runs
        proposal = self._searches.propose(trial_id)
        if proposal is None:
            return str(Searcher.FINISHED) if self._searches.over else None
        return {
            REQUEST: proposal.index,
            CONFIGURATION: proposal.configuration.to_dict(),
            INSTRUCTIONS: self._searches.state_of(trial_id).instructions(trial_id),
        }

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Nothing is left to do."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing is kept."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing was kept."""


class StateScheduler(FIFOScheduler):  # type: ignore[misc]
    """Trials start in the order in which they were proposed.

    Ray's FIFO looks through all trials at each step for the next one; those that wait are in a
    list of Ray's controller, from which it starts them where nothing is chosen here.
    """

    def __init__(self, searches: ConcurrentSearches) -> None:
        super().__init__()
        self._searches = searches
        self._waiting: dict[str, Trial] = {}
        self._has_cache = False

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Ray has taken the run."""
        self._waiting[trial.trial_id] = trial

    def forget(self, trial: Trial) -> None:
        """The run waits no more."""
        self._waiting.pop(trial.trial_id, None)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """None: see above. Stops what waits for a worker that will not come."""
        if not self._has_cache:
            self._has_cache = True
            use_actor_cache(tune_controller, WorkerCache(self._searches.keeps_worker))
        for run in self._searches.recalled():
            if run in self._waiting:
                tune_controller.stop_trial(self._waiting.pop(run))
        return None


class HaltStopper(Stopper):  # type: ignore[misc]
    """Ends the experiment once `halt` is set, which `StateCallback` does."""

    halt = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """A trial ends by itself."""
        return False

    def stop_all(self) -> bool:
        """Whether everything is to stop."""
        return self.halt


class StateCallback(Callback):  # type: ignore[misc]
    """Tells the states what becomes of trials, as soon as Ray knows it."""

    def __init__(
        self, searches: ConcurrentSearches, stopper: HaltStopper, scheduler: StateScheduler
    ) -> None:
        self._searches = searches
        self._stopper = stopper
        self._scheduler = scheduler
        self._actors: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        self._looked_s = -math.inf

    def on_trial_start(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any
    ) -> None:
        """A worker has taken the trial."""
        run = trial.trial_id
        self._scheduler.forget(trial)
        self._actors[self._searches.index_of(run)][run] = trial.temporary_state.ray_actor
        self._searches.state_of(run).start(run)

    def on_trial_result(
        self,
        iteration: int,
        trials: Sequence[Trial],
        trial: Trial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        """The outcome of the trial, or why its worker can run none.

        In the second case it goes on for Ray, and the worker keeps its GPU from other trials.
        """
        run = trial.trial_id
        state = self._searches.state_of(run)
        if UNFIT in result:
            state.refuse(run, result[UNFIT])
            return
        self._actors[self._searches.index_of(run)].pop(run, None)
        outcome = result[OUTCOME]
        assert isinstance(outcome, Outcome)
        state.end(run, outcome)

    def on_trial_error(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any
    ) -> None:
        """The worker was lost."""
        run = trial.trial_id
        self._scheduler.forget(trial)
        self._actors[self._searches.index_of(run)].pop(run, None)
        text = _error_text(trial)
        self._searches.state_of(run).lose(run, _message(text), with_node=NODE_DIED in text)

    def on_step_begin(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """Keep the progress moving, and pass a halt on.

        An interrupt can come at any point of a step. Passed on here, it is always followed
        by Ray stopping its trials and then by the end of this step. Raises `RayLostError`
        where a process of Ray's is lost, before Ray ends this one for it, and where an own Ray is
        given up: what stopped the search may have stopped Ray, which would be waited for.
        """
        self._searches.report()
        self._stopper.halt = self._searches.over
        if not self._stopper.halt:
            self._require_alive()
        elif self._searches.interrupted and is_own():
            raise RayLostError("it is given up")

    def _require_alive(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_PERIOD_S:
            self._looked_s = now_s
            require_alive()

    def on_step_end(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """End the workers that a search leaves behind: Ray waits until they are done.

        They run trials that are given up, or can run none.
        """
        for index, state in enumerate(self._searches.states):
            actors = self._actors[index]
            while actors and (state.over or self._stopper.halt):
                ray.kill(actors.popitem()[1])


class NoTrialProgress(TrialProgressCallback):  # type: ignore[misc]
    """Takes the place of Ray's own, which keeps and formats every result, and prints at times."""

    def on_trial_result(
        self,
        iteration: int,
        trials: Sequence[Trial],
        trial: Trial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        """Nothing."""

    def on_trial_error(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any
    ) -> None:
        """Nothing."""

    def on_trial_complete(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any
    ) -> None:
        """Nothing."""


def _error_text(trial: Trial) -> str:
    """What Ray keeps of the error of a trial."""
    path = trial.error_file
    return Path(path).read_text() if path and Path(path).exists() else ""


def _message(text: str) -> str:
    """The last line, which names the exception, or what became of the node."""
    text = masked(text, secret_values(os.environ))
    lines = [line.strip() for line in text.strip().splitlines()]
    for line in lines:
        if NODE_DIED in line:
            return f"{line}; {lines[-1]}" if lines[-1] != line else line
    return lines[-1] if lines else "the worker process was lost"


IDLE_S = 10.0
"""A worker that had no trial for so long gives its GPU back to the cluster."""


class RequestedResources(tune.PlacementGroupFactory):  # type: ignore[misc]
    """The resources of one trial, on one node.

    Ray gives the worker of a trial that ended to one that asks for equal resources. Those of two
    searches are never equal, so that a worker stays with its runner.
    """

    def __init__(self, resources: Mapping[str, float], request: int) -> None:
        super().__init__([dict(resources)])
        self.request = request

    def __eq__(self, other: object) -> bool:
        """Equal for the same search only."""
        return (
            isinstance(other, RequestedResources)
            and self.request == other.request
            and bool(super().__eq__(other))
        )

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.request))

    def __reduce__(self) -> Any:
        return (RequestedResources, (self._bundles[0], self.request))


class WorkerCache:
    """The idle workers between two trials; takes the place of Ray Tune's own cache of actors.

    Ray's keeps a worker only while another trial with its resources waits, or nothing waits at
    all: while one search waits for its node, those of all others would be started anew for
    each trial. Has the methods that `TuneController` calls.
    """

    total_max_objects = 0

    def __init__(
        self, keeps: Callable[[int], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keeps = keeps
        self._clock = clock
        self._idle: defaultdict[RequestedResources, list[tuple[float, Any]]] = defaultdict(list)

    @property
    def num_cached_objects(self) -> int:
        """How many workers are idle."""
        return sum(len(idle) for idle in self._idle.values())

    def increase_max(self, key: RequestedResources, by: int = 1) -> None:
        """How many trials wait is asked of the states instead."""

    def decrease_max(self, key: RequestedResources, by: int = 1) -> None:
        """As `increase_max`."""

    def has_cached_object(self, key: RequestedResources) -> bool:
        """Whether a worker with these resources is idle."""
        return bool(self._idle.get(key))

    def cache_object(self, key: RequestedResources, worker: Any) -> bool:
        """Keep a worker that has become idle; False where it is to end."""
        if not self._keeps(key.request):
            return False
        self._idle[key].append((self._clock(), worker))
        return True

    def pop_cached_object(self, key: RequestedResources) -> Any:
        """A worker with these resources; the one that was idle last is the likeliest to live."""
        idle = self._idle.get(key)
        return idle.pop()[1] if idle else None

    def flush_cached_objects(self, force_all: bool = False) -> Iterator[Any]:
        """The workers that are to end."""
        now_s = self._clock()
        for key, idle in self._idle.items():
            keeps = not force_all and self._keeps(key.request)
            while idle and not (keeps and now_s - idle[0][0] < IDLE_S):
                yield idle.pop(0)[1]
