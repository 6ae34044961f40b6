"""Reports the events of searches to Ray's metrics and to trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ray.tune.logger import LoggerCallback, TBXLoggerCallback
from ray.tune.result import TRAINING_ITERATION

from tuner.core.errors import UnavailableError
from tuner.core.records import Configuration, Outcome, Status, TrialRecord
from tuner.searches.progress import Progress
from tuner.searches.ray.metrics import SearchMetrics
from tuner.searches.request import SearchRequest
from tuner.searches.watch import Tracker, Tracking, Watch


class Watching:
    """The metrics and trackers of the searches of `requests`, one per GPU type of a run.

    They start with `begin`, which is called after Ray is initialised. All data is also kept
    elsewhere, so after `begin` no error here ends a search.
    """

    def __init__(self, requests: Sequence[SearchRequest]) -> None:
        self._requests = requests
        self._watch: Watch = requests[0].watch
        self._metrics: SearchMetrics | None = None
        self._trackers: list[tuple[Tracking, TrialTracker]] = []

    def begin(self) -> None:
        """Raises `UnavailableError` if a tracker cannot be written."""
        request = self._requests[0]
        for tracking in self._watch.track:
            try:
                tracker = tracker_of(tracking, request.space.name)
            except Exception as error:  # a server, a database or a folder, each with its own
                raise UnavailableError(
                    f"{tracking.tracker} at {tracking.where!r} cannot be written to: {error}",
                    hint="fix that, or search without --track",
                ) from error
            self._trackers.append((tracking, tracker))
        self._metrics = SearchMetrics(self._requests)

    def record(self, record: TrialRecord) -> None:
        """Report the record of a trial that ended; the journal has it already."""
        if self._metrics is not None:
            self._metrics.record(record)
        for tracking, tracker in list(self._trackers):
            try:
                tracker.record(record)
            except Exception as error:  # noqa: BLE001 - the search matters more than its copy
                self._trackers.remove((tracking, tracker))
                self._watch.tell(
                    f"{tracking.tracker} at {tracking.where!r} gets no more trials, from "
                    f"{record.trial_id} on: {error}"
                )

    def progress(self, every: Sequence[Progress], *, now: bool = False) -> None:
        """Report the progress of the searches, in the order of the requests."""
        if self._metrics is not None:
            self._metrics.progress(every, now=now)

    def decided(self, gpu: str, seconds: float) -> None:
        """Report the seconds that the search of this GPU type took to choose a trial."""
        if self._metrics is not None:
            self._metrics.decided(gpu, seconds)


FAILURES = (Status.CRASHED, Status.TIMEOUT, Status.INVALID, Status.INTERRUPTED)


class TrackedTrial:
    """A trial as Ray's loggers need it: a name, settings, and a folder for files."""

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
    """The numbers of an outcome for trackers, by names with units.

    Measured numbers have plain names, others begin with "emulated_" or "predicted_"; `ok` and
    `out_of_memory` are 1 or 0.
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
    """Writes each record as a run of a Ray logger, under the trial's id in the journal."""

    def __init__(self, logger: LoggerCallback, folder: Path) -> None:
        self._logger = logger
        self._folder = folder
        logger.setup()

    def record(self, record: TrialRecord) -> None:
        """Write a record. Running out of memory is a normal end; a lost worker is a failure."""
        folder = self._folder / record.space / record.gpu
        run = TrackedTrial(record.trial_id, record.configuration, folder)
        self._logger.log_trial_start(run)
        numbers = {**numbers_of(record.outcome), TRAINING_ITERATION: 1}
        self._logger.log_trial_result(1, run, numbers)
        self._logger.log_trial_end(run, failed=record.outcome.status in FAILURES)


def tracker_of(tracking: Tracking, experiment: str) -> TrialTracker:
    """The tracker for this destination; `experiment` is the name of MLflow's experiment."""
    return TrialTracker(_logger(tracking, experiment), Path(tracking.where))


def _logger(tracking: Tracking, experiment: str) -> LoggerCallback:
    if tracking.tracker is Tracker.TENSORBOARD:
        return TBXLoggerCallback()
    from ray.air.integrations.mlflow import MLflowLoggerCallback  # only for MLflow

    return MLflowLoggerCallback(
        tracking_uri=_mlflow_uri(tracking.where), experiment_name=experiment
    )


def _mlflow_uri(where: str) -> str:
    """A URI unchanged, or that of a database in a folder, because MLflow no longer keeps files."""
    if "://" in where or where == "databricks":
        return where
    folder = Path(where).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}"
