"""The budget of a search, its spending and its progress. Data only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tuner.core.errors import InputError
from tuner.core.records import Source, Status, TrialRecord
from tuner.searches.front import rate_of
from tuner.searches.options import SearchOptions

SECONDS_PER_HOUR = 3600.0


class StoppedBy(StrEnum):
    """Why a search ended."""

    BUDGET = "budget"
    """The search has run its number of trials."""
    EXHAUSTED = "exhausted"
    """Every valid configuration has been tried."""
    NOTHING_LEFT = "nothing_left"
    """No configuration is left that may fit."""
    TIME_LIMIT = "time_limit"
    GPU_HOURS = "gpu_hours"
    MAX_COST = "max_cost"
    MIN_GAIN = "min_gain"
    """No remaining configuration has enough expected gain."""
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    """No worker can run its trials."""


def device_s(records: Iterable[TrialRecord], gpus_per_trial: float, running: int = 0) -> float:
    """Device time in seconds once `running` trials and one more have taken the mean time.

    Reused trials count, emulated ones cost nothing.
    """
    took = [r.outcome.duration_s for r in records if r.source is Source.MEASURED]
    mean_s = sum(took) / len(took) if took else 0.0
    return gpus_per_trial * (sum(took) + (running + 1) * mean_s)


def eta_s(ends_s: Sequence[float], workers: int, left: int, now_s: float) -> float | None:
    """Remaining time for `left` trials at the rate at which trials of this run ended.

    The rate excludes the first trial of each worker, in which the worker starts and imports
    torch; otherwise, the first estimate would be several times too long. None until further
    trials have ended: at least one, and half as many as there are workers.
    """
    counted = len(ends_s) - workers
    if not workers or counted < max(1, workers / 2):
        return None
    return (now_s - ends_s[workers - 1]) / counted * left


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a search among its `options`; None is no limit.

    - `trials` and the GPU time, `gpu_hours`, include reused trials of earlier runs, so that a
      request repeated after an interruption spends no more in total; `time_limit_s` is the time of
      this run alone.
    - `max_cost_usd` limits the cost of the GPU time at `usd_per_hour` for each GPU.
    - `min_gain` is the smallest expected gain, as a share, for which a trial is worth running.

    A trial doesn't begin if it would exceed the GPU hours or the cost by taking the mean time of
    earlier trials. Raises `InputError` for invalid limits.
    """

    options: SearchOptions
    usd_per_hour: float | None = None

    def __post_init__(self) -> None:
        options = self.options
        problems = [
            f"{name} is {value}, and must be more than 0"
            for name, value in (
                ("the time limit in seconds", options.time_limit_s),
                ("the limit of GPU hours", options.gpu_hours),
                ("the maximal cost", options.max_cost_usd),
                ("the smallest gain", options.min_gain),
            )
            if value is not None and not value > 0
        ]
        if options.trials < 1:
            problems.append(f"trials is {options.trials}, and must be at least 1")
        if problems:
            raise InputError("; ".join(problems))
        if options.max_cost_usd is not None and self.usd_per_hour is None:
            raise InputError(
                "a maximum cost needs the price of the GPU, which is unknown",
                hint="give its price per hour with --price, or limit --gpu-hours",
            )

    def device_limit_s(self) -> tuple[float, StoppedBy] | None:
        """The allowed GPU time in seconds, and the limit that determines it; None without one."""
        limits = []
        if self.options.gpu_hours is not None:
            limits.append((self.options.gpu_hours * SECONDS_PER_HOUR, StoppedBy.GPU_HOURS))
        if self.options.max_cost_usd is not None and self.usd_per_hour:
            hours = self.options.max_cost_usd / self.usd_per_hour
            limits.append((hours * SECONDS_PER_HOUR, StoppedBy.MAX_COST))
        return min(limits, default=None)

    def used_up(
        self,
        *,
        trials: int,
        elapsed_s: float,
        device_s: float,
        expected_gain: Callable[[], float | None] = lambda: None,
    ) -> StoppedBy | None:
        """The limit that keeps further trials from beginning, or None.

        `trials` have begun in `elapsed_s` seconds, and the next one is expected to end after
        `device_s` seconds on devices (see `device_s`). `expected_gain` returns the largest
        expected gain of any trial as a share, or None if unknown; it is called last, and only if
        `min_gain` is set.
        """
        options = self.options
        if trials >= options.trials:
            return StoppedBy.BUDGET
        if options.time_limit_s is not None and elapsed_s >= options.time_limit_s:
            return StoppedBy.TIME_LIMIT
        limit = self.device_limit_s()
        if limit is not None and device_s > limit[0]:
            return limit[1]
        if options.min_gain is not None:
            gain = expected_gain()
            if gain is not None and gain < options.min_gain:
                return StoppedBy.MIN_GAIN
        return None


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a search at one moment.

    `done` counts all trials that ended, including `reused`, `oom` and `failed` ones. `best` is the
    fastest that fits. `eta_s` is None until enough trials have ended after the first ones of all
    workers. `total` is the planned number of trials, or `done` if that is more. `verified` counts
    the runs that verified the best, which are in neither `done` nor `total`. `front` is the Pareto
    front of throughput and memory over the trials that ran, the smallest first. `held_back` counts
    the configurations that are not tried because they would fail.
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
    front: Sequence[TrialRecord] = ()
    held_back: int = 0

    @classmethod
    def of(
        cls, records: Sequence[TrialRecord], *, total: int, elapsed_s: float, **more: Any
    ) -> Progress:
        """The progress of a search that has these records; `more` are the other fields."""
        statuses = Counter(record.outcome.status for record in records)
        verified = sum(record.verification for record in records)
        done = len(records) - verified
        return cls(
            done=done,
            oom=statuses[Status.OOM],
            failed=len(records) - statuses[Status.OK] - statuses[Status.OOM],
            total=max(total, done),
            best=max((r for r in records if r.fits), key=rate_of, default=None),
            elapsed_s=elapsed_s,
            verified=verified,
            **more,
        )
