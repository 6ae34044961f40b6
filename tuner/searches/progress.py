"""How far a search is. Data only: drawing it is the command line's part."""

from __future__ import annotations

from dataclasses import dataclass, field

from tuner.core.records import Status, TrialRecord


@dataclass(frozen=True, slots=True)
class Progress:
    """One moment of a search.

    `done` counts all trials that ended, with the `reused` ones, `oom` and `failed` among
    them. `best` is the fastest that fits. `eta_s` is None until enough trials have ended after the
    first ones of all workers. `total` are those that are asked for, or known where that is more.
    `verified` counts the runs that measured the best again, beside `done` and `total`.
    """

    done: int
    running: int
    oom: int
    failed: int
    reused: int
    total: int
    best: TrialRecord | None
    elapsed_s: float
    eta_s: float | None
    verified: int = 0


def samples_per_s(record: TrialRecord) -> float:
    """Throughput of the record by its best evidence; 0 where there is none."""
    evidence = record.outcome.evidence
    return evidence.speed.samples_per_s if evidence is not None else 0.0


@dataclass(slots=True)
class ProgressTracker:
    """Counts trials as they start and end. Times are seconds on the caller's clock."""

    total: int
    started_s: float
    time_limit_s: float | None = None
    reused: int = 0
    records: list[TrialRecord] = field(default_factory=list)
    best: TrialRecord | None = None
    _running: set[str] = field(default_factory=set)
    _oom: int = 0
    _failed: int = 0
    _verified: int = 0
    _workers: int = 0
    _ends_s: list[float] = field(default_factory=list)

    def reuse(self, record: TrialRecord) -> None:
        """Count a trial that an earlier run has done."""
        self.reused += 1
        self._count(record)

    def start(self, trial: str) -> None:
        """Count a trial that begins to run."""
        self._running.add(trial)
        self._workers = max(self._workers, len(self._running))

    def end(self, trial: str, record: TrialRecord | None, now_s: float) -> None:
        """Count a trial that no longer runs; `record` is None when it is to run again."""
        self._running.discard(trial)
        if record is not None:
            self._count(record)
            self._ends_s.append(now_s)

    def at(self, now_s: float) -> Progress:
        """The state of the search at `now_s`."""
        done = len(self.records) - self._verified
        return Progress(
            done=done,
            running=len(self._running),
            oom=self._oom,
            failed=self._failed,
            reused=self.reused,
            total=max(self.total, done),
            best=self.best,
            elapsed_s=now_s - self.started_s,
            eta_s=self._eta_s(now_s),
            verified=self._verified,
        )

    def _count(self, record: TrialRecord) -> None:
        self.records.append(record)
        self._verified += record.verification
        status = record.outcome.status
        self._oom += status is Status.OOM
        self._failed += status not in (Status.OK, Status.OOM)
        if record.fits and (self.best is None or samples_per_s(record) > samples_per_s(self.best)):
            self.best = record

    def _eta_s(self, now_s: float) -> float | None:
        """Time left at the rate of this run so far, and no more than the limit leaves.

        The rate is that after the first trial of each worker, in which it starts and imports
        torch: with it, the first estimate would be several times too long. None until half as many
        trials have ended since, and one at least.
        """
        counted = len(self._ends_s) - self._workers
        if not self._workers or counted < max(1, self._workers / 2):
            return None
        per_trial_s = (now_s - self._ends_s[self._workers - 1]) / counted
        left_s = per_trial_s * (self.total - len(self.records) + self._verified)
        if self.time_limit_s is not None:
            left_s = min(left_s, max(0.0, self.started_s + self.time_limit_s - now_s))
        return left_s
