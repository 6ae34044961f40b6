"""When a search has had enough: trials, time, GPU time, money, or too little left to gain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from tuner.core.errors import InputError
from tuner.core.records import Source, TrialRecord

SECONDS_PER_HOUR = 3600.0


class StoppedBy(StrEnum):
    """Why a search ended."""

    BUDGET = "budget"
    """As many trials as were asked for."""
    EXHAUSTED = "exhausted"
    """Every valid configuration has been tried."""
    NOTHING_LEFT = "nothing_left"
    """No configuration is left that may fit."""
    TIME_LIMIT = "time_limit"
    GPU_HOURS = "gpu_hours"
    MAX_COST = "max_cost"
    MIN_GAIN = "min_gain"
    """No configuration is left of which enough is expected."""
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    """No worker can run its trials."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a search has come to: trials begun, its own time, and time on devices.

    `device_s` is of trials that really ran and ended, those taken over included; `mean_device_s`
    is what one of them took, None before there is one. `running` have not ended yet.
    """

    trials: int
    elapsed_s: float
    device_s: float = 0.0
    mean_device_s: float | None = None
    running: int = 0

    def with_next_s(self) -> float:
        """Time on devices once what runs, and one trial more, has taken as long as the mean."""
        return self.device_s + (self.running + 1) * (self.mean_device_s or 0.0)


class Meter:
    """Adds up the time on devices as trials end; emulated ones cost nothing."""

    def __init__(self, gpus_per_trial: float, records: Iterable[TrialRecord] = ()) -> None:
        self._gpus_per_trial = gpus_per_trial
        self._device_s = 0.0
        self._measured = 0
        for record in records:
            self.add(record)

    def add(self, record: TrialRecord) -> None:
        """Count a trial that ended."""
        if record.source is Source.MEASURED:
            self._device_s += record.outcome.duration_s * self._gpus_per_trial
            self._measured += 1

    def spent(self, *, trials: int, elapsed_s: float, running: int) -> Spent:
        """What has been spent after `elapsed_s` seconds, with `trials` begun."""
        mean_s = self._device_s / self._measured if self._measured else None
        return Spent(trials, elapsed_s, self._device_s, mean_s, running)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a search may spend; None is no limit.

    - `trials` and the time on GPUs, `gpu_hours`, count those of earlier runs that are taken
      over, so that the same request repeated after an interruption spends no more in the end;
      `time_limit_s` is the time of this run.
    - `max_cost_usd` is the time on GPUs at `usd_per_hour` each.
    - `min_gain` is the smallest expected gain, as a share, for which a trial is worth running.

    No trial begins that goes beyond the GPU hours or the cost if it takes as long as the mean of
    those before. Raises `InputError` for what is no budget.
    """

    trials: int
    time_limit_s: float | None = None
    gpu_hours: float | None = None
    max_cost_usd: float | None = None
    usd_per_hour: float | None = None
    min_gain: float | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}, and must be more than 0"
            for name, value in (
                ("the time limit in seconds", self.time_limit_s),
                ("the limit of GPU hours", self.gpu_hours),
                ("the maximal cost", self.max_cost_usd),
                ("the smallest gain", self.min_gain),
            )
            if value is not None and not value > 0
        ]
        if self.trials < 1:
            problems.append(f"trials is {self.trials}, and must be at least 1")
        if problems:
            raise InputError("; ".join(problems))
        if self.max_cost_usd is not None and self.usd_per_hour is None:
            raise InputError(
                "a maximum cost needs the price of the GPU, which is unknown",
                hint="give its price per hour with --price, or limit --gpu-hours",
            )

    def device_limit_s(self) -> tuple[float, StoppedBy] | None:
        """The time on GPUs that may be used, in seconds, and which limit says so."""
        limits = []
        if self.gpu_hours is not None:
            limits.append((self.gpu_hours * SECONDS_PER_HOUR, StoppedBy.GPU_HOURS))
        if self.max_cost_usd is not None and self.usd_per_hour:
            hours = self.max_cost_usd / self.usd_per_hour
            limits.append((hours * SECONDS_PER_HOUR, StoppedBy.MAX_COST))
        return min(limits, default=None)

    def used_up(
        self, so_far: Spent, *, expected_gain: Callable[[], float | None] = lambda: None
    ) -> StoppedBy | None:
        """Why no further trial is to begin, or None.

        `expected_gain` gives the largest expected gain of any trial as a share, or None where
        that is not known; it is asked last, and only where it matters.
        """
        if so_far.trials >= self.trials:
            return StoppedBy.BUDGET
        if self.time_limit_s is not None and so_far.elapsed_s >= self.time_limit_s:
            return StoppedBy.TIME_LIMIT
        limit = self.device_limit_s()
        if limit is not None and so_far.with_next_s() > limit[0]:
            return limit[1]
        if self.min_gain is not None:
            gain = expected_gain()
            if gain is not None and gain < self.min_gain:
                return StoppedBy.MIN_GAIN
        return None
