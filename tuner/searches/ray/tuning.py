"""Ray Tune's side of searches: it asks for trials, starts and reuses their actors, and sees losses.

Each trial of Tune has an actor of Tune's on the trial's node, which takes no resources, and starts
one that has them: its calls are named by what they train, which Ray's dashboard shows.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.exceptions import ActorDiedError, RayError
from ray.tune import Callback, Stopper
from ray.tune.experiment import Trial
from ray.tune.search import Searcher
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tuner.core.errors import TunerError
from tuner.core.records import Outcome
from tuner.searches.crew import Crew
from tuner.searches.nodes import Need
from tuner.searches.ray.cluster import options_of
from tuner.searches.worker import TrialWorker, WorkerPlan

INDEX, NODE, NAME, ACTOR, PROPOSED = "index", "node", "name", "actor", "proposed"
"""Keys of a trial's config: its search, the id of its node, its name, that of a new actor, and its
configuration and instructions."""
BEGUN, OUTCOME, UNFIT = "begun", "outcome", "unfit"
"""Keys of what a trial reports: the actor that begins with it, its outcome, or the error of an
actor that can run none."""

NODE_ID = "ray.io/node-id"
"""Label that Ray gives each node."""

CLOSE_WITHIN_S = 10.0
"""An actor has this long to remove what it keeps."""

ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # Errors of trials whose actors are ended on purpose need no handling.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    # The search has its own journal, progress and handling of Ctrl-C.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "1e9",
    "TUNE_RESULT_BUFFER_LENGTH": "1",
    # An actor that does not end, on a silent node, is killed after this time. Ray Tune then waits
    # 10 seconds for it; with a shorter time, it would do nothing else until they are over.
    "TUNE_FORCE_TRIAL_CLEANUP_S": "11",
    # The searches decide how many trials wait for a node.
    "TUNE_MAX_PENDING_TRIALS_PG": "100000",
}
"""Ray Tune's settings, by the variables that it documents."""


class _TrialTrainable(tune.Trainable):  # type: ignore[misc]
    """A trial of Tune: starts an actor with the trial's resources, or uses the one that it has.

    An actor that can run no trial keeps its resources until the search is over: otherwise a broken
    GPU would get trial after trial.
    """

    plans: Sequence[tuple[WorkerPlan, Need]] = ()
    """The plans and needs of the searches, by their index; see `run`."""

    def setup(self, config: dict[str, Any]) -> None:
        self._index: int | None = None
        self._actor: Any = None
        self._name = ""
        self._take(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next trial. Returns True; False would fail it."""
        self._take(new_config)
        return True

    def _take(self, config: dict[str, Any]) -> None:
        if config[INDEX] != self._index:
            self.cleanup()
            self._index = config[INDEX]
        self._config, self._begins, self._is_unfit = config, True, False

    def step(self) -> dict[str, Any]:
        """Report that the trial begins, then its outcome, or why none can run here."""
        if self._is_unfit:
            threading.Event().wait()
        if self._begins:
            self._begins = False
            error = None if self._actor is not None else self._start()
            return {BEGUN: self._name} if error is None else self._unfit(error)
        called = self._actor.run.options(name=self._config[NAME])
        answer = ray.get(called.remote(*self._config[PROPOSED]))
        if isinstance(answer, TunerError):
            return self._unfit(answer)
        return {"done": True, OUTCOME: answer}

    def _start(self) -> TunerError | None:
        """Start the actor. Returns the error if it can run no trial."""
        assert self._index is not None
        plan, need = self.plans[self._index]
        self._name = self._config[ACTOR]
        group = ray.util.get_current_placement_group()
        self._actor = ray.remote(TrialWorker).options(
            **options_of(need),
            name=self._name,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        ).remote(plan)  # fmt: skip
        prepared = self._actor.prepare.options(name=f"prepare {plan.title}").remote()
        error: TunerError | None = ray.get(prepared)
        return error

    def _unfit(self, error: TunerError) -> dict[str, Any]:
        self._is_unfit = True
        return {UNFIT: error}

    def cleanup(self) -> None:
        """End the actor; Ray calls this when the trial's own ends."""
        actor, self._actor = self._actor, None
        if actor is not None:
            with contextlib.suppress(RayError):  # it is gone
                ray.get(actor.close.remote(), timeout=CLOSE_WITHIN_S)
            ray.kill(actor)


class _CrewSearcher(Searcher):  # type: ignore[misc]
    """Gives Ray Tune the trials that searches propose; `_CrewCallback` takes their results."""

    def __init__(self, crew: Crew) -> None:
        super().__init__()
        self._crew = crew

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next trial, `FINISHED`, or None while there is none.

        A running trial can lose its worker, so the search is not finished before its trials.
        """
        self._crew.step()  # Ray may wait here while no trial runs
        run = self._crew.propose(trial_id)
        if run is None:
            return str(Searcher.FINISHED) if self._crew.over else None
        return {
            INDEX: run.index,
            NODE: run.node.id,
            NAME: run.name,
            ACTOR: f"{self._crew.plan(run.index).title} {trial_id}",
            PROPOSED: (run.proposed.configuration, run.proposed.instructions),
        }

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Do nothing."""

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: a search is resumed from its journal, never from Ray's files."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing: no state was saved."""


class _Halt(Stopper):  # type: ignore[misc]
    """Ends the experiment once `is_over` is set, which `_CrewCallback` does."""

    is_over = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """False: a trial ends by itself."""
        return False

    def stop_all(self) -> bool:
        """True if the whole experiment must stop."""
        return self.is_over


class _CrewCallback(Callback):  # type: ignore[misc]
    """Tells searches about begins and ends of their trials, as soon as Ray Tune knows them."""

    def __init__(self, crew: Crew, halt: _Halt) -> None:
        self._crew, self._halt = crew, halt
        self._actors: dict[str, str] = {}

    def on_step_begin(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """Look at the nodes and the time, and pass on an end."""
        self._crew.step()
        self._halt.is_over = self._crew.over

    def on_step_end(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """End the actors of trials that are given up: Ray waits for them."""
        for run in self._crew.given_up():
            with contextlib.suppress(ValueError):  # it has ended, or has not begun
                ray.kill(ray.get_actor(self._actors.pop(run, "")))

    def on_trial_start(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any
    ) -> None:
        """Note the name of the actor that the trial may start."""
        self._actors[trial.trial_id] = trial.config[ACTOR]

    def on_trial_result(
        self,
        iteration: int,
        trials: Sequence[Trial],
        trial: Trial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        """Take a begin, an outcome, or the reason why an actor can run no trial."""
        run = trial.trial_id
        if BEGUN in result:
            self._actors[run] = result[BEGUN]
            self._crew.begin(run)
        elif UNFIT in result:
            self._crew.refuse(run, result[UNFIT])
        else:
            assert isinstance(result[OUTCOME], Outcome)
            self._actors.pop(run, None)
            self._crew.end(run, result[OUTCOME])

    def on_trial_error(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any
    ) -> None:
        """Note that the trial's actor was lost."""
        self._actors.pop(trial.trial_id, None)
        path = Path(trial.pickled_error_file or "")
        error: Any = ray.cloudpickle.loads(path.read_bytes()) if path.is_file() else None
        cause = getattr(error, "cause", None) or error
        preempted = isinstance(cause, ActorDiedError) and cause.preempted
        self._crew.lose(trial.trial_id, str(cause or ""), preempted=preempted)


def run(crew: Crew, folder: Path) -> None:
    """Run trials until all searches are over; Ray Tune keeps its files in `folder`."""

    class _PlannedTrainable(_TrialTrainable):  # the plans are sent with its class
        plans = tuple((crew.plan(index), need) for index, need in enumerate(crew.needs))

    halt = _Halt()
    # `tune.run` and not `tune.Tuner`, which pickles the searcher into a file: nothing is ever
    # restored from it, and the callbacks of a search cannot be pickled.
    tune.run(
        tune.with_resources(_PlannedTrainable, functools.partial(_resources, needs=crew.needs)),
        name="search",
        search_alg=_CrewSearcher(crew),
        stop=halt,
        callbacks=[_CrewCallback(crew, halt)],
        num_samples=-1,
        reuse_actors=True,
        max_failures=0,  # a search tries a lost trial again itself, after all others
        raise_on_failed_trial=False,
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        storage_path=str(folder),
        trial_dirname_creator=lambda trial: str(trial.trial_id),
        verbose=0,
    )


def _resources(config: Mapping[str, Any], *, needs: Sequence[Need]) -> tune.PlacementGroupFactory:
    """The resources of a trial, on the node that was chosen for it."""
    return tune.PlacementGroupFactory(
        [{}, dict(needs[config[INDEX]].resources)], bundle_label_selector=[{NODE_ID: config[NODE]}]
    )
