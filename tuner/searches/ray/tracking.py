"""Trials as runs of TensorBoard or MLflow, through Ray's own callbacks for these.

Those callbacks expect the settings and the numbers of a training run. What passes between the
driver and its workers is a configuration and an `Outcome`; this makes the one of the other, from
the records that go into the journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ray.tune.logger import LoggerCallback, TBXLoggerCallback
from ray.tune.result import TRAINING_ITERATION

from tuner.core.records import Configuration, Outcome, Status, TrialRecord
from tuner.searches.watch import Tracker, Tracking

FAILURES = (Status.CRASHED, Status.TIMEOUT, Status.INVALID, Status.INTERRUPTED)


class TrackedTrial:
    """What a logger of Ray's asks a trial for: a name, settings, and a folder to write into."""

    def __init__(self, trial_id: str, configuration: Configuration, folder: Path) -> None:
        self.trial_id = trial_id
        self.config = {
            name: "+".join(value) if isinstance(value, tuple) else value
            for name, value in configuration.to_dict().items()
        }
        self.evaluated_params = self.config
        self._folder = folder / trial_id

    @property
    def local_path(self) -> str:
        """The folder of this trial."""
        return str(self._folder)

    def init_local_path(self) -> None:
        """Make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        return self.trial_id


def numbers_of(outcome: Outcome) -> Mapping[str, float]:
    """What a tracker draws of an outcome: names with units, and numbers only.

    Measured numbers are under their own names, others begin with "emulated_" and "predicted_";
    `ok` and `out_of_memory` are 1 or 0.
    """
    found: dict[str, float] = {
        "ok": float(outcome.status is Status.OK),
        "out_of_memory": float(outcome.status is Status.OOM),
        "trial_s": outcome.duration_s,
    }
    for prefix, numbers in (
        ("", outcome.measurement),
        ("emulated_", outcome.emulation),
        ("predicted_", outcome.prediction),
    ):
        if numbers is None:
            continue
        memory, speed = numbers.memory, numbers.speed
        found |= {
            f"{prefix}samples_per_s": speed.samples_per_s,
            f"{prefix}tokens_per_s": speed.tokens_per_s,
            f"{prefix}step_s": speed.step_s,
            f"{prefix}device_bytes": float(memory.device_bytes),
            f"{prefix}peak_allocated_bytes": float(memory.peak_allocated_bytes),
        }
        if speed.mfu is not None:
            found[f"{prefix}mfu"] = speed.mfu
    return found


class TrialTracker:
    """Makes each record a run of a logger of Ray's, under the trial's id in the journal."""

    def __init__(self, logger: LoggerCallback, folder: Path) -> None:
        self._logger = logger
        self._folder = folder
        logger.setup()

    def record(self, record: TrialRecord) -> None:
        """A trial ended. Out of memory is an end like others; a lost worker is a failure."""
        folder = self._folder / record.space / record.gpu
        run = TrackedTrial(record.trial_id, record.configuration, folder)
        self._logger.log_trial_start(run)
        numbers = {**numbers_of(record.outcome), TRAINING_ITERATION: 1}
        self._logger.log_trial_result(1, run, numbers)
        self._logger.log_trial_end(run, failed=record.outcome.status in FAILURES)


def tracker_of(tracking: Tracking, experiment: str) -> TrialTracker:
    """What writes trials there; `experiment` is the name of MLflow's experiment."""
    return TrialTracker(_logger(tracking, experiment), Path(tracking.where))


def _logger(tracking: Tracking, experiment: str) -> LoggerCallback:
    if tracking.tracker is Tracker.TENSORBOARD:
        return TBXLoggerCallback()
    from ray.air.integrations.mlflow import MLflowLoggerCallback  # only where it is asked for

    return MLflowLoggerCallback(
        tracking_uri=_mlflow_uri(tracking.where), experiment_name=experiment
    )


def _mlflow_uri(where: str) -> str:
    """A URI as it is; a folder as a database in it, as MLflow keeps no files any more."""
    if "://" in where or where == "databricks":
        return where
    folder = Path(where).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}"
