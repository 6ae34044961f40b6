"""How far a search is. Data only: drawing it is the command line's part."""

from __future__ import annotations

from dataclasses import dataclass, field

from tuner.records import Status, TrialRecord


@dataclass(frozen=True, slots=True)
class Progress:
    """One moment of a search.

    `done` counts all trials that ended, with the `reused` ones, `oom` and `failed` among
    them. `best` is the fastest that fits. `eta_s` is None until a trial has ended.
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
    _first_start_s: float | None = None

    def reuse(self, record: TrialRecord) -> None:
        """Count a trial that an earlier run has done."""
        self.reused += 1
        self._count(record)

    def start(self, trial: str, now_s: float) -> None:
        """Count a trial that begins to run."""
        self._running.add(trial)
        if self._first_start_s is None:
            self._first_start_s = now_s

    def end(self, trial: str, record: TrialRecord | None) -> None:
        """Count a trial that no longer runs; `record` is None when it is to run again."""
        self._running.discard(trial)
        if record is not None:
            self._count(record)

    def at(self, now_s: float) -> Progress:
        """The state of the search at `now_s`."""
        return Progress(
            done=len(self.records),
            running=len(self._running),
            oom=self._oom,
            failed=self._failed,
            reused=self.reused,
            total=self.total,
            best=self.best,
            elapsed_s=now_s - self.started_s,
            eta_s=self._eta_s(now_s),
        )

    def _count(self, record: TrialRecord) -> None:
        self.records.append(record)
        status = record.outcome.status
        self._oom += status is Status.OOM
        self._failed += status not in (Status.OK, Status.OOM)
        if record.fits and (self.best is None or samples_per_s(record) > samples_per_s(self.best)):
            self.best = record

    def _eta_s(self, now_s: float) -> float | None:
        """Time left at the rate of this run so far, and no more than the limit leaves.

        The start of Ray is not part of the rate.
        """
        ended_now = len(self.records) - self.reused
        if not ended_now or self._first_start_s is None:
            return None
        per_trial_s = (now_s - self._first_start_s) / ended_now
        left_s = per_trial_s * (self.total - len(self.records))
        if self.time_limit_s is not None:
            left_s = min(left_s, max(0.0, self.started_s + self.time_limit_s - now_s))
        return left_s
