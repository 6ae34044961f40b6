"""The state of one running search: its proposed, running and finished trials."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

from tuner.core.errors import TunerError, UnavailableError
from tuner.core.kinds import LOST
from tuner.core.records import Configuration, MemoryBudget, Outcome, Status, TrialRecord
from tuner.core.records.trial import utc_now
from tuner.searches.failures import everything_fails
from tuner.searches.journal import pooled
from tuner.searches.open_trials import OpenTrials, Proposed, record_of
from tuner.searches.progress import Progress, StoppedBy, device_s, eta_s
from tuner.searches.proposer import Proposer
from tuner.searches.ranking import REPEAT_SHARE, Ranking, give_up_rule, near_tie, to_verify
from tuner.searches.request import SearchOutcome, SearchRequest
from tuner.trial.base import PLAIN, GiveUp, Instructions

PROGRESS_PERIOD_S = 1.0

LOSSES_THAT_END_A_SEARCH = 3
"""A search ends if its first outcomes are this many trials that lost their workers, or this many
workers that can run no trial."""

TIMES_TO_VERIFY = 3.5
"""A verification takes this many times a trial: 47.8 s against 13.9 s on an H100 (2026-11)."""

MOST_OF_THE_TIME = 0.5
"""No more of the time limit than this share is kept for the verification."""

STOPPED_BY_WHAT_IS_LEFT = (StoppedBy.EXHAUSTED, StoppedBy.NOTHING_LEFT, StoppedBy.MIN_GAIN)
"""Reasons for which a search ends before its budget is spent."""


class SearchState:
    """Hands out configurations and turns their outcomes into records.

    Ray calls it with the ids of its own trials, one call at a time; each is one run of a trial.
    `failure` is the error that ends this search. `broken` is an exception of a callback, which ends
    all searches; it is kept here because Ray would only pass on its text.
    """

    def __init__(
        self,
        request: SearchRequest,
        adapter: Proposer,
        *,
        on_record: Callable[[TrialRecord], None],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._request = request
        self._adapter = adapter
        self._on_record = on_record
        self._on_progress = on_progress
        self.open = OpenTrials()
        self._budget = request.budget
        self._options = request.options
        self._lost = 0
        self._reported_s = -math.inf
        self.records: list[TrialRecord] = []
        """The reused records, then those of trials that ended, in the order of their ends."""
        self.reused = 0
        """Number of reused records in `records`."""
        self._total = min(request.options.trials, len(adapter.candidates))
        self._started_s = time.monotonic()
        self._ends_s: list[float] = []
        self._workers = 0
        self.stopped_by: StoppedBy | None = None
        self.failure: TunerError | None = None
        self.broken: Exception | None = None
        self._is_late = False
        self.unfit_workers: dict[str, TunerError] = {}
        """Errors of workers that can run no trial, by the runs that revealed them."""
        self._unfit_and_gone = 0
        self._warnings: list[str] = []
        self.stale = 0
        self._stood = Ranking()
        self._begun = 0
        """Number of trials begun that count for the budget, without verifications."""

    @property
    def halted(self) -> bool:
        """True if running trials must be given up."""
        return (
            self.failure is not None
            or self.broken is not None
            or self._is_late
            or self.stopped_by is StoppedBy.INTERRUPTED
        )

    @property
    def has_outcomes(self) -> bool:
        """True once a trial of this run has ended."""
        return len(self.records) > self.reused

    @property
    def progress(self) -> Progress:
        """The progress of the search now."""
        left = self._total - sum(not record.verification for record in self.records)
        eta = eta_s(self._ends_s, self._workers, left, self.elapsed_s)
        return Progress.of(
            self.records,
            running=self.open.running,
            reused=self.reused,
            total=self._total,
            elapsed_s=self.elapsed_s,
            eta_s=None if eta is None else min(eta, max(0.0, self._left_s)),
            front=self._ranking.front(),
            held_back=self._adapter.held_back,
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._started_s

    def result(self) -> SearchOutcome:
        """The result of the search, once it is over."""
        stopped_by = StoppedBy.FAILED if self.failure is not None else self.stopped_by
        assert stopped_by is not None
        return SearchOutcome(
            records=tuple(self.records),
            reused=self.reused,
            candidates=len(self._adapter.candidates),
            stopped_by=stopped_by,
            duration_s=self.elapsed_s,
            pruned=self._adapter.pruned,
            stale=self.stale,
            failure=self.failure,
            warnings=tuple(
                dict.fromkeys(
                    filter(None, (*self._warnings, *self._adapter.notes, self._ranking.unsteady()))
                )
            ),
        )

    def reuse(self) -> None:
        """Take over the journal's known records, in its order; the last line of a trial counts."""
        candidates, request = self._adapter.candidates, self._request
        known: dict[str, TrialRecord] = {}
        for record in request.resume:
            if record.configuration not in candidates:
                continue
            if request.is_known(record):
                known[record.trial_id] = record
            elif request.is_stale(record) and not record.verification:
                self._adapter.remember(record)
                self.stale += 1
        for record in known.values():
            self.records.append(record)
            self.reused += 1
            self._begun += not record.verification
            self._learn(record)
        # The known trials may already satisfy the request.
        reason = self._reason_to_stop()
        if reason is not None and self._next_run(reason) is None:
            self.stopped_by = reason

    def interrupt(self) -> None:
        """Give up running trials and propose no more. Safe in a signal handler."""
        self.stopped_by = StoppedBy.INTERRUPTED

    def propose(self, ray_id: str) -> Configuration | None:
        """The configuration for a new run; None if there is none, for now or any more.

        Trials that no worker has begun come first, and those that were lost come last.
        """
        if self.halted:
            return None
        if (again := self.open.hand_out_again(ray_id)) is not None:
            return again.configuration
        if self.finished:
            return None
        reason = self._reason_to_stop()
        proposed = self._next_run(reason)
        if proposed is None and reason is None:
            configuration = self._adapter.propose()
            if configuration is not None:
                proposed = Proposed(configuration, self._rule_for(configuration))
            else:
                reason = StoppedBy.NOTHING_LEFT
                proposed = self._next_run(reason)
        retries = proposed is None and reason in (StoppedBy.BUDGET, *STOPPED_BY_WHAT_IS_LEFT)
        if retries and (again := self.open.hand_out_again(ray_id, lost=True)) is not None:
            return again.configuration
        if proposed is None:
            waits = self._options.verify or reason in (StoppedBy.BUDGET, *STOPPED_BY_WHAT_IS_LEFT)
            if not (waits and self.open.on_workers):  # running trials may change the decision
                self.stopped_by = self.stopped_by or reason  # unless interrupted meanwhile
            return None
        self.open.hand_out(ray_id, proposed)
        self._begun += not proposed.instructions.verify
        self._total = max(self._total, self._begun)
        return proposed.configuration

    def instructions(self, ray_id: str) -> Instructions:
        """The instructions of the trial that was proposed under this id."""
        return self.open[ray_id].instructions

    def _next_run(self, reason: StoppedBy | None) -> Proposed | None:
        """A run of a configuration that has run before: a near-tie, or a verification.

        `reason` is the reason why no new configuration is tried; None if one may be. Near-ties use
        the last part of the budget; the verification comes after it, when no trial runs.
        """
        if self._request.trial_device is None:
            return None
        last = (1 - REPEAT_SHARE) * self._options.trials <= self._begun
        if (reason is None and last) or reason in STOPPED_BY_WHAT_IS_LEFT:
            left = self._begun < self._options.trials and not self._request.objectives
            tied = near_tie(self._ranking) if left else None
            if tied is not None and not self.open.includes(tied):
                return Proposed(tied, PLAIN)
        ended = reason not in (None, StoppedBy.INTERRUPTED)
        waits = len(self.open) if reason is not StoppedBy.TIME_LIMIT else self.open.on_workers
        if not (self._options.verify and ended) or waits or self._left_s < self._trial_s:
            return None
        best = to_verify(self._ranking, *self._request.objectives[:1])
        return None if best is None else Proposed(best, Instructions(verify=True))

    def _rule_for(self, configuration: Configuration) -> Instructions:
        """Instructions with the rule for giving up the trial; repeats, too, run in full."""
        request = self._request
        known = configuration in request.initial or self._ranking.runs(configuration)
        if request.trial_device is None or known:
            return PLAIN
        budget = MemoryBudget(request.gpu.memory_bytes, request.margin_bytes or 0)
        if request.objectives:  # a slow trial may still win in another objective
            return Instructions(give_up=GiveUp(budget.usable_bytes, ()))
        return Instructions(give_up=give_up_rule(self._ranking, budget.usable_bytes))

    @property
    def finished(self) -> bool:
        """True if no new trial will be proposed; running trials can still change the result."""
        return self.stopped_by is not None or self.failure is not None or self.broken is not None

    @property
    def over(self) -> bool:
        """True if the search is over; any running trials must then be given up."""
        return self.finished and (self.halted or not len(self.open))

    def start(self, ray_id: str) -> None:
        """Note that a worker begins the trial, possibly for the second time."""
        if ray_id not in self.open:
            return
        self.open.begin(ray_id, utc_now())
        self._workers = max(self._workers, self.open.running)
        self.report()

    def end(self, ray_id: str, outcome: Outcome, *, node: str | None = None) -> None:
        """Record the outcome of a trial on a node; one that was killed may run again instead."""
        if self.failure is not None or self.broken is not None or ray_id not in self.open:
            return
        if outcome.status is Status.INTERRUPTED and not self.halted:
            if self._runs_again(ray_id, outcome.message):
                return
            outcome = dataclasses.replace(outcome, message=f"{LOST}: {outcome.message}")
        record = record_of(self._request, *self.open.close(ray_id), outcome, node)
        self.records.append(record)
        self._ends_s.append(self.elapsed_s)
        self._unfit_and_gone = 0
        with self._keeping_failure():
            self._on_record(record)
            self._learn(record)
            own = self.records[self.reused :]
            if (error := everything_fails(own, self._adapter.failures)) is not None:
                self.fail(error)
        self.report()

    def lose(self, ray_id: str, message: str, *, with_node: bool = False) -> None:
        """Handle a worker that died or raised, or a lost node: run the trial again, or give it up.

        The loss of a worker that can run no trial does not count, unless several are lost in a row:
        new workers on the same broken device would otherwise be started for ever.
        """
        unfit = self.unfit_workers.pop(ray_id, None)
        if unfit is not None:
            self._unfit_and_gone += not with_node
            if self._unfit_and_gone >= LOSSES_THAT_END_A_SEARCH and not self.open.on_workers:
                self.fail(unfit)
            return
        if self.halted or ray_id not in self.open:
            return
        if self._runs_again(ray_id, message, with_node=with_node):
            return
        if self.open[ray_id].unbegun:
            self.fail(_no_worker(f"workers end before they begin with a trial: {message}"))
            return
        self.end(ray_id, Outcome(status=Status.CRASHED, message=f"{LOST}: {message}"))

    def _runs_again(self, ray_id: str, message: str, *, with_node: bool = False) -> bool:
        """True if a trial that was lost runs again; the search ends if all the first are lost."""
        begun = not self.open.is_waiting(ray_id)
        if not self.open.lose(ray_id, with_node=with_node):
            return False
        if begun:
            self._warnings.append(f"a trial was tried again: {message}")
            self._lost += not with_node
            if self._lost == LOSSES_THAT_END_A_SEARCH and not self.has_outcomes:
                self.fail(
                    _no_worker(f"each of the first {self._lost} trials lost its worker: {message}")
                )
        return True

    def refuse(self, ray_id: str, error: TunerError) -> None:
        """Handle a worker that can run no trial: its trial goes to another worker."""
        if self.halted or ray_id not in self.open:
            return
        self.open.take_back(ray_id)
        self.unfit_workers[ray_id] = error
        self._warnings.append(f"a worker was not used: {error.message}")
        gives_up = not self.has_outcomes and len(self.unfit_workers) >= LOSSES_THAT_END_A_SEARCH
        if gives_up or not isinstance(error, UnavailableError):
            self.fail(next(iter(self.unfit_workers.values())) if gives_up else error)
        self.report()

    def give_up_late(self) -> None:
        """Give up running trials once the time limit is over."""
        if self._left_s <= 0 and not self.over:
            self._is_late = True
            self.stopped_by = self.stopped_by or StoppedBy.TIME_LIMIT

    @property
    def _left_s(self) -> float:
        """Seconds until the time limit; infinite without one."""
        limit_s = self._options.time_limit_s
        return math.inf if limit_s is None else limit_s - self.elapsed_s

    @property
    def _trial_s(self) -> float:
        """Median seconds of this run's trials that ran; 0 before the first."""
        own = [r.outcome for r in self.records[self.reused :] if not r.verification]
        took = [outcome.duration_s for outcome in own if outcome.ran is not None]
        return statistics.median(took) if took else 0.0

    @property
    def _kept_s(self) -> float:
        """Seconds of the time limit that are kept for one more trial and the verification."""
        limit_s = self._options.time_limit_s
        if limit_s is None:
            return 0.0
        verifies = self._options.verify and self._request.trial_device is not None
        kept_s = TIMES_TO_VERIFY * self._trial_s * verifies
        return self._trial_s + min(kept_s, MOST_OF_THE_TIME * limit_s)

    def recall(self, ray_id: str) -> None:
        """Take back a run that no worker will begin; its trial waits for another run."""
        if ray_id in self.open:
            self.open.take_back(ray_id)

    def fail(self, error: TunerError) -> None:
        """End the search with an error, unless it is interrupted."""
        if self.stopped_by is not StoppedBy.INTERRUPTED:
            self.failure = self.failure or error

    def _learn(self, record: TrialRecord) -> None:
        """Tell the sampler about a record, also pooled with earlier runs of its configuration.

        Verifications are left out: they also evaluate, so their memory isn't the predicted one.
        """
        if record.verification:
            return
        runs = self._ranking.runs(record.configuration)
        self._adapter.tell(record, pooled([run for run in runs if not run.verification]))

    def report(self, *, periodic: bool = False) -> None:
        """Report the progress; if `periodic`, only once in `PROGRESS_PERIOD_S`."""
        now_s = time.monotonic()
        if periodic and now_s - self._reported_s < PROGRESS_PERIOD_S:
            return
        self._reported_s = now_s
        with self._keeping_failure():
            self._on_progress(self.progress)

    def _reason_to_stop(self) -> StoppedBy | None:
        if not self._adapter.candidates.remaining_count:
            return StoppedBy.EXHAUSTED
        return self._budget.used_up(
            trials=self._begun,
            elapsed_s=self.elapsed_s + self._kept_s,
            device_s=device_s(self.records, self._request.gpus_per_trial, len(self.open)),
            expected_gain=self._adapter.expected_gain,
        )

    @property
    def _ranking(self) -> Ranking:
        """The ranking of the records, updated once for each outcome."""
        for record in self.records[self._stood.count :]:
            self._stood.add(record)
        return self._stood

    @contextlib.contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver raises it again
            self.broken = self.broken or error


def _no_worker(message: str) -> UnavailableError:
    return UnavailableError(
        message, hint="the trials are not the cause; check the memory of their machines"
    )


def first_broken(states: Iterable[SearchState]) -> Exception | None:
    """The first exception that a callback of a search raised; None without one."""
    return next((state.broken for state in states if state.broken is not None), None)
