"""The state of one running search: what was proposed, what runs, what it came to."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from tuner.errors import UnavailableError
from tuner.records import Configuration, Outcome, Status, TrialRecord
from tuner.tune.budget import StoppedBy, spent
from tuner.tune.progress import Progress, ProgressTracker
from tuner.tune.proposer import Proposer
from tuner.tune.request import SearchRequest

PROGRESS_PERIOD_S = 1.0

LOSSES_THAT_END_A_SEARCH = 3
"""This many lost workers before anything else has come of a search are no accident."""


class Ledger:
    """Hands out configurations and turns what comes back into records.

    Ray calls it by the ids of its own trials, one call at a time. An exception of a callback
    ends the search; `failure` keeps it, as Ray would only pass on its text.
    """

    def __init__(
        self,
        request: SearchRequest,
        proposer: Proposer,
        *,
        on_record: Callable[[TrialRecord], None],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._request = request
        self._proposer = proposer
        self._on_record = on_record
        self._on_progress = on_progress
        self._proposed: dict[str, tuple[int, Configuration]] = {}
        self._started_at: dict[str, str] = {}
        self._budget = request.budget
        self._lost = 0
        self._reported_s = -math.inf
        self._tracker = ProgressTracker(
            total=min(request.trials, len(proposer.candidates)),
            started_s=time.monotonic(),
            time_limit_s=request.time_limit_s,
        )
        self.stopped_by: StoppedBy | None = None
        self.failure: Exception | None = None

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """Those taken over first, then those that ended, in the order in which they did."""
        return tuple(self._tracker.records)

    @property
    def reused(self) -> int:
        """How many of `records` were taken over."""
        return self._tracker.reused

    @property
    def candidate_count(self) -> int:
        """How many valid configurations there were to choose from."""
        return len(self._proposer.candidates)

    @property
    def halted(self) -> bool:
        """Whether trials that run are to be given up."""
        return self.failure is not None or self.stopped_by is StoppedBy.INTERRUPTED

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._tracker.started_s

    def reuse(self) -> None:
        """Take over what the journal knows; the last record of a configuration counts."""
        known = {
            record.configuration.key: record
            for record in self._request.resume
            if record.configuration in self._proposer.candidates and self._request.is_known(record)
        }
        for record in known.values():
            self._proposer.tell(record)
            self._tracker.reuse(record)
        # What is known may already be all that was asked for.
        self.stopped_by = self._reason_to_stop()

    def interrupt(self) -> None:
        """Give up what runs and propose nothing more. Safe in a signal handler."""
        self.stopped_by = StoppedBy.INTERRUPTED

    def propose(self, ray_id: str) -> Configuration | None:
        """The configuration for a new trial; None when there is to be none, for now or any more."""
        if self.finished:
            return None
        reason = self._reason_to_stop()
        if reason is StoppedBy.MIN_GAIN and self._running_count:
            return None  # what runs may yet show that there is something to gain
        if reason is not None:
            self.stopped_by = self.stopped_by or reason  # an interrupt may come in between
            return None
        configuration = self._proposer.propose()
        if configuration is not None:
            self._proposed[ray_id] = (len(self._proposed) + 1, configuration)
        elif not self._running_count:
            self.stopped_by = StoppedBy.NOTHING_LEFT
        return configuration

    @property
    def finished(self) -> bool:
        """Whether no trial will be proposed any more. What runs can still change a verdict."""
        return self.stopped_by is not None or self.failure is not None

    def start(self, ray_id: str) -> None:
        """A worker begins with the trial, maybe for the second time."""
        self._started_at[ray_id] = _utc_now()
        self._tracker.start(ray_id, time.monotonic())
        self.report()

    def end(self, ray_id: str, outcome: Outcome) -> None:
        """The trial came to an outcome."""
        if self.failure is not None:
            return
        record = self._record(ray_id, outcome)
        self._tracker.end(ray_id, record)
        with self._keeping_failure():
            self._on_record(record)
            self._proposer.tell(record)
        self.report()

    def lose(self, ray_id: str, message: str, *, retried: bool) -> None:
        """The trial's worker died or raised. Ray runs the trial again, or gives it up."""
        if self.halted:
            return
        if retried:
            self._tracker.end(ray_id, None)
            return
        self._lost += 1
        self.end(ray_id, Outcome(status=Status.CRASHED, message=message))
        if self._lost == len(self.records) - self.reused == LOSSES_THAT_END_A_SEARCH:
            self.fail(
                UnavailableError(
                    f"each of the first {self._lost} trials lost its worker process: {message}",
                    hint="this is not the trials' doing; check the memory of this machine",
                )
            )

    def fail(self, error: Exception) -> None:
        """The search cannot go on."""
        self.failure = error

    def report(self, *, periodic: bool = False) -> None:
        """Tell the progress; when `periodic`, only if it is time."""
        now_s = time.monotonic()
        if periodic and now_s - self._reported_s < PROGRESS_PERIOD_S:
            return
        self._reported_s = now_s
        with self._keeping_failure():
            self._on_progress(self._tracker.at(now_s))

    def _reason_to_stop(self) -> StoppedBy | None:
        if not self._proposer.candidates.remaining_count:
            return StoppedBy.EXHAUSTED
        so_far = spent(
            self.records,
            trials=self.reused + len(self._proposed),
            elapsed_s=self.elapsed_s,
            running=self._running_count,
            gpus_per_trial=self._request.gpus_per_trial,
        )
        return self._budget.used_up(so_far, expected_gain=self._proposer.expected_gain)

    @property
    def _running_count(self) -> int:
        return len(self._proposed) - (len(self.records) - self.reused)

    def _record(self, ray_id: str, outcome: Outcome) -> TrialRecord:
        request, bench = self._request, self._request.bench
        number, configuration = self._proposed[ray_id]
        if outcome.prediction is None:
            known = request.predictions.get(configuration.key)
            outcome = dataclasses.replace(outcome, prediction=known)
        return TrialRecord(
            trial_id=f"{request.run_id}-{number:03d}",
            space=request.space.name,
            gpu=request.gpu.id,
            gpu_memory_bytes=request.gpu.memory_bytes,
            configuration=configuration,
            outcome=outcome,
            seed=request.seed,
            started_at=self._started_at.get(ray_id) or _utc_now(),
            versions=request.versions,
            searcher=request.searcher,
            run_id=request.run_id,
            device=bench.device if bench else None,
            memory_limit_bytes=bench.memory_limit_bytes if bench else None,
            margin_bytes=request.margin_bytes if bench else None,
        )

    @contextlib.contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver raises it again
            self.failure = error


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
