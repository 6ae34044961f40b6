"""The state of one running search: what was proposed, what runs, what it came to."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from tuner.errors import UnavailableError
from tuner.records import Configuration, Outcome, Status, TrialRecord
from tuner.results.pruned import Pruned
from tuner.results.repeats import pooled
from tuner.runner.base import PLAIN, GiveUp, Instructions
from tuner.tune.budget import StoppedBy, spent
from tuner.tune.contenders import REPEAT_SHARE, Standing, give_up_rule, near_tie, to_verify
from tuner.tune.progress import Progress, ProgressTracker
from tuner.tune.proposer import Proposer
from tuner.tune.request import SearchRequest

PROGRESS_PERIOD_S = 1.0

LOSSES_THAT_END_A_SEARCH = 3
"""This many lost workers before anything else has come of a search are no accident."""


STOPPED_BY_WHAT_IS_LEFT = (StoppedBy.EXHAUSTED, StoppedBy.NOTHING_LEFT, StoppedBy.MIN_GAIN)
"""Ends of a search at which budget is left."""


@dataclass(frozen=True, slots=True)
class _Proposed:
    """A trial that was handed out. `number` counts them from 1."""

    configuration: Configuration
    instructions: Instructions
    number: int = 0


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
        self._proposed: dict[str, _Proposed] = {}
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
        self.stale = 0
        self._stood = Standing()
        self._begun = 0

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
    def pruned(self) -> tuple[Pruned, ...]:
        """What was not tried because it cannot fit, with what was revived."""
        return self._proposer.pruned

    @property
    def halted(self) -> bool:
        """Whether trials that run are to be given up."""
        return self.failure is not None or self.stopped_by is StoppedBy.INTERRUPTED

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._tracker.started_s

    def reuse(self) -> None:
        """Take over what the journal knows, in its order; of a trial the last line counts."""
        candidates, request = self._proposer.candidates, self._request
        known: dict[str, TrialRecord] = {}
        for record in request.resume:
            if record.configuration not in candidates:
                continue
            if request.is_known(record):
                known[record.trial_id] = record
            elif request.is_stale(record) and not record.verification:
                self._proposer.remember(record)
                self.stale += 1
        for record in known.values():
            self._tracker.reuse(record)
            self._begun += not record.verification
            self._learn(record)
        # What is known may already be all that was asked for.
        reason = self._reason_to_stop()
        if reason is not None and self._next_run(reason) is None:
            self.stopped_by = reason

    def interrupt(self) -> None:
        """Give up what runs and propose nothing more. Safe in a signal handler."""
        self.stopped_by = StoppedBy.INTERRUPTED

    def propose(self, ray_id: str) -> Configuration | None:
        """The configuration for a new trial; None when there is to be none, for now or any more."""
        if self.finished:
            return None
        reason = self._reason_to_stop()
        proposed = self._next_run(reason)
        if proposed is None and reason is None:
            configuration = self._proposer.propose()
            if configuration is not None:
                proposed = _Proposed(configuration, self._rule_for(configuration))
            else:
                reason = StoppedBy.NOTHING_LEFT
                proposed = self._next_run(reason)
        if proposed is None:
            waits = self._request.verify or reason in STOPPED_BY_WHAT_IS_LEFT
            if not (waits and self._running_count):  # what runs may yet change the verdict
                self.stopped_by = self.stopped_by or reason  # an interrupt may come in between
            return None
        self._proposed[ray_id] = dataclasses.replace(proposed, number=len(self._proposed) + 1)
        self._begun += not proposed.instructions.verify
        self._tracker.total = max(self._tracker.total, self.reused + len(self._proposed))
        return proposed.configuration

    def instructions(self, ray_id: str) -> Instructions:
        """What is particular to the trial that was proposed under this id."""
        return self._proposed[ray_id].instructions

    def _next_run(self, reason: StoppedBy | None) -> _Proposed | None:
        """A run of a configuration that has run before: a near-tie, or a verification.

        `reason` is why no other configuration is to be tried, if that is so. Near-ties are part
        of the budget and come last in it; the verification comes after it, when nothing runs.
        """
        if self._request.bench is None:
            return None
        last = (1 - REPEAT_SHARE) * self._request.trials <= self._trial_count
        if (reason is None and last) or reason in STOPPED_BY_WHAT_IS_LEFT:
            left = self._trial_count < self._request.trials and not self._request.objectives
            tied = near_tie(self._standing) if left else None
            if tied is not None and not self._runs_now(tied):
                return _Proposed(tied, PLAIN)
        ended = reason not in (None, StoppedBy.TIME_LIMIT, StoppedBy.INTERRUPTED)
        if not (self._request.verify and ended) or self._running_count:
            return None
        best = to_verify(self._standing, *self._request.objectives[:1])
        return None if best is None else _Proposed(best, Instructions(verify=True))

    def _runs_now(self, configuration: Configuration) -> bool:
        begun = sum(p.configuration == configuration for p in self._proposed.values())
        new = self.records[self.reused :]
        return begun > sum(record.configuration == configuration for record in new)

    def _rule_for(self, configuration: Configuration) -> Instructions:
        """When to give the trial up. What the user asked for, the baseline, runs in full."""
        request = self._request
        if request.bench is None or configuration in request.initial:
            return PLAIN
        usable_bytes = request.gpu.memory_bytes - (request.margin_bytes or 0)
        if request.objectives:  # what is slow may still win in another objective
            return Instructions(give_up=GiveUp(usable_bytes, ()))
        return Instructions(give_up=give_up_rule(self._standing, usable_bytes))

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
            self._learn(record)
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

    def _learn(self, record: TrialRecord) -> None:
        """Tell the sampler, of a configuration that ran again what all its runs say together.

        A verification evaluates too, and so tells of other memory than predictions do.
        """
        if record.verification:
            return
        runs = self._standing.runs(record.configuration)
        self._proposer.tell(pooled([run for run in runs if not run.verification]))

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
            trials=self._trial_count,
            elapsed_s=self.elapsed_s,
            running=self._running_count,
            gpus_per_trial=self._request.gpus_per_trial,
        )
        return self._budget.used_up(so_far, expected_gain=self._proposer.expected_gain)

    @property
    def _standing(self) -> Standing:
        """What the records say, worked out once for each outcome."""
        for record in self._tracker.records[self._stood.count :]:
            self._stood.add(record)
        return self._stood

    @property
    def _trial_count(self) -> int:
        """Trials begun that count for the budget; verifications do not."""
        return self._begun

    @property
    def _running_count(self) -> int:
        return len(self._proposed) - (len(self.records) - self.reused)

    def _record(self, ray_id: str, outcome: Outcome) -> TrialRecord:
        request, bench = self._request, self._request.bench
        proposed = self._proposed[ray_id]
        configuration = proposed.configuration
        if outcome.prediction is None:
            known = request.predictions.get(configuration.key)
            outcome = dataclasses.replace(outcome, prediction=known)
        return TrialRecord(
            trial_id=f"{request.run_id}-{proposed.number:03d}",
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
            verification=proposed.instructions.verify,
        )

    @contextlib.contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver raises it again
            self.failure = error


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
