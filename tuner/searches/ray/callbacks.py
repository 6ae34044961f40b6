"""Ray Tune's side of searches: searcher, scheduler, stopper and callback for their states."""

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
"""Text in Ray's `ActorDiedError` if the node was lost, not only the worker."""


class StateSearcher(Searcher):  # type: ignore[misc]
    """Gives Ray the configurations that the states propose.

    Results do not come back this way: `StateCallback` gets each one first. The state is not saved,
    because a search is resumed from the trial journal and never from Ray's own files.
    """

    def __init__(self, searches: ConcurrentSearches) -> None:
        super().__init__()
        self._searches = searches

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next run, `FINISHED`, or None while neither is known.

        A running trial can lose its worker, so the search is not finished before its trials.
        """
        self._searches.report()  # Ray may wait here while no trial runs
        configuration = self._searches.propose(trial_id)
        if configuration is None:
            return str(Searcher.FINISHED) if self._searches.over else None
        return {
            REQUEST: self._searches.index_of(trial_id),
            CONFIGURATION: configuration.to_dict(),
            INSTRUCTIONS: self._searches.state_of(trial_id).instructions(trial_id),
        }

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Do nothing."""

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: no state is saved."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing: no state was saved."""


class StateScheduler(FIFOScheduler):  # type: ignore[misc]
    """Starts trials in the order in which they were proposed.

    Ray's FIFO scheduler searches all trials for the next one at each step. This one chooses none,
    so that Ray's controller starts them from its list of waiting trials.
    """

    def __init__(self, searches: ConcurrentSearches) -> None:
        super().__init__()
        self._searches = searches
        self._waiting: dict[str, Trial] = {}
        self._has_cache = False

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Note that Ray has taken the run."""
        self._waiting[trial.trial_id] = trial

    def forget(self, trial: Trial) -> None:
        """Note that the run no longer waits."""
        self._waiting.pop(trial.trial_id, None)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Return None (see the class); stop runs that wait for a worker that will not come."""
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
        """False: a trial ends by itself."""
        return False

    def stop_all(self) -> bool:
        """True if the whole experiment must stop."""
        return self.halt


class StateCallback(Callback):  # type: ignore[misc]
    """Tells the states about starts and ends of trials, as soon as Ray knows them."""

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
        """Note that a worker has begun the trial."""
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
        """Take the outcome of the trial, or the reason why its worker can run no trial.

        In the second case the trial goes on for Ray, so that the worker keeps its GPU from other
        trials.
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
        """Note that the worker was lost."""
        run = trial.trial_id
        self._scheduler.forget(trial)
        self._actors[self._searches.index_of(run)].pop(run, None)
        text = _error_text(trial)
        self._searches.state_of(run).lose(run, _message(text), with_node=NODE_DIED in text)

    def on_step_begin(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """Report the progress, and pass on a halt.

        An interrupt can come at any point of a step. If it is passed on here, Ray always stops its
        trials and then ends this step. Raises `RayLostError` if a Ray process is lost, before Ray
        ends this process because of it. Raises it also if an interrupted search has its own Ray:
        the signal may have stopped Ray too, and waiting for it would not end.
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
        """End the remaining workers of searches that are over, because Ray waits for them.

        They run trials that are given up, or can run no trial.
        """
        for index, state in enumerate(self._searches.states):
            actors = self._actors[index]
            while actors and (state.over or self._stopper.halt):
                ray.kill(actors.popitem()[1])


class NoTrialProgress(TrialProgressCallback):  # type: ignore[misc]
    """Replaces Ray's progress callback, which keeps, formats and sometimes prints results."""

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
    """The error text that Ray keeps of a trial; empty without one."""
    path = trial.error_file
    return Path(path).read_text() if path and Path(path).exists() else ""


def _message(text: str) -> str:
    """The line about the lost node, if any, and the last line, which names the exception."""
    text = masked(text, secret_values(os.environ))
    lines = [line.strip() for line in text.strip().splitlines()]
    for line in lines:
        if NODE_DIED in line:
            return f"{line}; {lines[-1]}" if lines[-1] != line else line
    return lines[-1] if lines else "the worker process was lost"


IDLE_S = 10.0
"""A worker without a trial gives its GPU back to the cluster after this time."""


class RequestedResources(tune.PlacementGroupFactory):  # type: ignore[misc]
    """The resources of one trial, on one node.

    Ray reuses the worker of a trial that ended for a trial with equal resources. The resources of
    two searches are never equal, so that a worker stays with its runner.
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
    """The idle workers between two trials; replaces Ray Tune's own cache of actors.

    Ray's cache keeps a worker only while a trial with its resources waits, or while no trial waits
    at all: if one search waited for its node, the workers of all others would be restarted for each
    trial. This class has the methods that `TuneController` calls.
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
        """Number of idle workers."""
        return sum(len(idle) for idle in self._idle.values())

    def increase_max(self, key: RequestedResources, by: int = 1) -> None:
        """Do nothing: the states know the number of waiting trials."""

    def decrease_max(self, key: RequestedResources, by: int = 1) -> None:
        """Do nothing, as `increase_max`."""

    def has_cached_object(self, key: RequestedResources) -> bool:
        """True if a worker with these resources is idle."""
        return bool(self._idle.get(key))

    def cache_object(self, key: RequestedResources, worker: Any) -> bool:
        """Keep a worker that has become idle; False if it must end."""
        if not self._keeps(key.request):
            return False
        self._idle[key].append((self._clock(), worker))
        return True

    def pop_cached_object(self, key: RequestedResources) -> Any:
        """The most recently idle worker with these resources, which most likely lives; or None."""
        idle = self._idle.get(key)
        return idle.pop()[1] if idle else None

    def flush_cached_objects(self, force_all: bool = False) -> Iterator[Any]:
        """Yield the workers that must end."""
        now_s = self._clock()
        for key, idle in self._idle.items():
            keeps = not force_all and self._keeps(key.request)
            while idle and not (keeps and now_s - idle[0][0] < IDLE_S):
                yield idle.pop(0)[1]
