"""Ray Tune's side of a search: its searcher, its stopper and its callback, over one ledger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.tune import Callback, Stopper
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from tuner.records import Outcome
from tuner.tune.ledger import Ledger
from tuner.tune.trainable import CONFIGURATION, FAILURE, INSTRUCTIONS, OUTCOME


class LedgerSearcher(Searcher):  # type: ignore[misc]
    """Gives Ray the configurations that the ledger proposes.

    Nothing comes back this way: `LedgerCallback` sees each result first. The state is not
    saved, as a search is resumed from the trial journal and never from Ray's own files.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next configuration under one key, `FINISHED`, or None while that is not known."""
        configuration = self._ledger.propose(trial_id)
        if configuration is None:
            return str(Searcher.FINISHED) if self._ledger.finished else None
        return {
            CONFIGURATION: configuration.to_dict(),
            INSTRUCTIONS: self._ledger.instructions(trial_id),
        }

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Nothing is left to do."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing is kept."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing was kept."""


class HaltStopper(Stopper):  # type: ignore[misc]
    """Ends the experiment once `halt` is set, which `LedgerCallback` does."""

    halt = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """A trial ends by itself."""
        return False

    def stop_all(self) -> bool:
        """Whether everything is to stop."""
        return self.halt


class LedgerCallback(Callback):  # type: ignore[misc]
    """Tells the ledger what becomes of trials, as soon as Ray knows it."""

    def __init__(self, ledger: Ledger, stopper: HaltStopper) -> None:
        self._ledger = ledger
        self._stopper = stopper
        self._actors: dict[str, Any] = {}

    def on_trial_start(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any
    ) -> None:
        """A worker has taken the trial."""
        self._actors[trial.trial_id] = trial.temporary_state.ray_actor
        self._ledger.start(trial.trial_id)

    def on_trial_result(
        self,
        iteration: int,
        trials: Sequence[Trial],
        trial: Trial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        """The one result of the trial: its outcome, or why no trial can run."""
        self._actors.pop(trial.trial_id, None)
        if FAILURE in result:
            self._ledger.fail(result[FAILURE])
            return
        outcome = result[OUTCOME]
        assert isinstance(outcome, Outcome)
        self._ledger.end(trial.trial_id, outcome)

    def on_trial_recover(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any
    ) -> None:
        """The worker was lost, and the trial goes to another one."""
        self._actors.pop(trial.trial_id, None)
        self._ledger.lose(trial.trial_id, _error_text(trial), retried=True)

    def on_trial_error(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any
    ) -> None:
        """The worker was lost for the second time."""
        self._actors.pop(trial.trial_id, None)
        self._ledger.lose(trial.trial_id, _error_text(trial), retried=False)

    def on_step_begin(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """Keep the progress moving, and pass a halt on.

        An interrupt can come at any point of a step. Passed on here, it is always followed
        by Ray stopping its trials and then by the end of this step.
        """
        self._ledger.report(periodic=True)
        self._stopper.halt = self._ledger.halted

    def on_step_end(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """End the workers of the trials that Ray stopped, or it waits until they are done."""
        while self._stopper.halt and self._actors:
            ray.kill(self._actors.popitem()[1])


def _error_text(trial: Trial) -> str:
    """The last line of the error that Ray keeps of a trial, which names the exception."""
    path = trial.error_file
    lines = Path(path).read_text().strip().splitlines() if path and Path(path).exists() else []
    return lines[-1].strip() if lines else "the worker process was lost"
