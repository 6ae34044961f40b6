"""The expected gain of a candidate, in throughput and memory or in other objectives."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.core.gpu import Gpu
from tuner.core.records import (
    Configuration,
    Memory,
    MemoryBudget,
    Outcome,
    Phase,
    Prediction,
    Speed,
    Status,
    TrialRecord,
)
from tuner.searches.front import Direction, Objective
from tuner.searches.objectives import require_known

Floats = NDArray[np.float64]

FAR = 4.0
"""Outcomes more than this many standard deviations away are ignored."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Independent quantities whose logarithms are normal: mean and standard deviation of each."""

    mean: Floats
    sd: Floats

    @property
    def expected(self) -> Floats:
        """The mean of each quantity itself."""
        return np.asarray(np.exp(self.mean + self.sd**2 / 2))

    def probability_below(self, value: float) -> Floats:
        """The probability that each is at most `value`."""
        return _below((np.log(value) - self.mean) / self.sd)

    def expected_above(self, value: float) -> Floats:
        """E[max(0, X - value)] of each X (the formula of Black and Scholes 1973)."""
        if value <= 0:
            return self.expected - value
        d = (self.mean - np.log(value)) / self.sd
        return self.expected * _below(d + self.sd) - value * _below(d)

    def expected_below(self, value: float) -> Floats:
        """E[max(0, value - X)] of each X."""
        if value <= 0:
            return np.zeros_like(self.mean)
        d = (self.mean - np.log(value)) / self.sd
        return value * _below(-d) - self.expected * _below(-(d + self.sd))


def staircase(speed: Floats, size: Floats) -> NDArray[np.intp]:
    """Places of the Pareto front of throughput and memory, smallest first.

    Of equal ones only the first is included.
    """
    order = np.lexsort((-speed, size))
    rising = np.diff(np.maximum.accumulate(speed[order]), prepend=-np.inf) > 0
    return np.asarray(order[rising])


@dataclass(frozen=True, slots=True)
class Front:
    """The Pareto front of the candidates known to fit: throughput rises with memory.

    `reference_bytes` is the memory at which the hypervolume ends, `usable_bytes` the memory
    without the margin; both are the same without a margin.
    """

    speed: Floats
    size: Floats
    usable_bytes: float
    reference_bytes: float

    @classmethod
    def of(
        cls, speed: Floats, size: Floats, *, usable_bytes: float, reference_bytes: float
    ) -> Front:
        """The front of the points that fit, smallest first."""
        fits = size <= usable_bytes
        speed, size = speed[fits], size[fits]
        kept = staircase(speed, size)
        return cls(speed[kept], size[kept], usable_bytes, reference_bytes)

    @property
    def hypervolume(self) -> float:
        """The area between the staircase and (0, `reference_bytes`)."""
        ends = np.append(self.size[1:], self.reference_bytes)
        return float(self.speed @ (ends - self.size))

    @property
    def fastest(self) -> float:
        """The largest throughput on the front; 0 if it is empty."""
        return float(self.speed.max(initial=0.0))

    def expected_gain(self, speed: LogNormal, size: LogNormal) -> Floats:
        """Expected hypervolume that each candidate adds, exact for independent objectives.

        The gain of a point is the integral over memory u from its own to the reference of
        max(0, its speed - the staircase at u). On each step of the staircase, the expectation is
        a product of two one-dimensional ones (after Emmerich, Deutz and Klinkenberg 2011). A
        candidate that needs more than `usable_bytes` adds nothing, and neither does one that is
        still dominated if it turns out `FAR` standard deviations better.
        """
        gain = np.zeros_like(speed.mean)
        steps = np.searchsorted(self.size, np.exp(size.mean - FAR * size.sd), side="right")
        covered = np.concatenate([[0.0], self.speed])[steps]
        hopeful = np.flatnonzero(np.exp(speed.mean + FAR * speed.sd) > covered)
        gain[hopeful] = self._integral(
            LogNormal(speed.mean[hopeful], speed.sd[hopeful]),
            LogNormal(size.mean[hopeful], size.sd[hopeful]),
        )
        return gain

    def _integral(self, speed: LogNormal, size: LogNormal) -> Floats:
        edges = np.concatenate([[0.0], self.size, [self.usable_bytes]])
        heights = np.concatenate([[0.0], self.speed])
        gain = np.zeros_like(speed.mean)
        below = np.zeros_like(speed.mean)
        for height, edge in zip(heights, edges[1:], strict=True):
            next_below = size.expected_below(float(edge))
            above = speed.expected_above(float(height))
            gain += above * (next_below - below)
            below = next_below
        # Between usable and reference memory, only the probability of being usable matters.
        rest = self.reference_bytes - self.usable_bytes
        return gain + above * rest * size.probability_below(self.usable_bytes)


def _below(z: Floats) -> Floats:
    from scipy.special import ndtr

    return np.asarray(ndtr(z))


POWERS: Mapping[str, tuple[float, float]] = {
    "samples_per_s": (1.0, 0.0),
    "tokens_per_s": (1.0, 0.0),
    "step_s": (1.0, 0.0),
    "epoch_usd": (1.0, 0.0),
    "device_bytes": (0.0, -1.0),
    "peak_allocated_bytes": (0.0, -1.0),
    "peak_reserved_bytes": (0.0, -1.0),
    "lora_rank": (0.0, 0.0),
    "length_coverage": (0.0, 0.0),
}
"""Exponents of throughput and memory to which each objective, to be maximized, is proportional."""

DIRECTIONS = 64
"""Number of directions over which the hypervolume is averaged."""

NODES = ((-math.sqrt(3.0), 1 / 6), (0.0, 2 / 3), (math.sqrt(3.0), 1 / 6))
"""Three points and weights that integrate polynomials of a standard normal up to degree 5."""


@dataclass(frozen=True, slots=True)
class Goal:
    """An objective to maximize: `factor * throughput**speed_power * memory**size_power`.

    `factor` has one entry per candidate; 0 if the objective has no value, so it is on no front.
    """

    name: str
    factor: Floats
    speed_power: float
    size_power: float


def goals_of(
    objectives: Sequence[Objective],
    configurations: Sequence[Configuration],
    predictions: Sequence[Prediction],
) -> tuple[Goal, ...]:
    """The objectives as goals, with factors from their predicted values.

    Raises `UnavailableError` for an objective that no prediction has a value of.
    """
    records = [_as_if(c, p) for c, p in zip(configurations, predictions, strict=True)]
    require_known(records, objectives)
    return tuple(_goal(objective, records) for objective in objectives)


def check_known(
    objectives: Sequence[Objective], configurations: Sequence[Configuration], gpu: Gpu
) -> None:
    """Raise `UnavailableError` for an objective that will certainly have no value.

    Objectives that depend on the configuration alone are tested with a made-up speed; a cost needs
    a price. `goals_of` finds other missing values.
    """
    speed = Speed(step_s=1.0, it_per_s=1.0, samples_per_s=1.0, tokens_per_s=1.0, mfu=None)
    memory = Memory(1, 1, 1, 1, {}, Phase.BACKWARD, {})
    made_up = Prediction(MemoryBudget(gpu.memory_bytes), memory, speed, 1, 1, gpu.id, "made up")
    records = [_as_if(configuration, made_up) for configuration in configurations]
    priceless = gpu.price_usd_per_hour is None
    plain = [o for o in objectives if POWERS[o.name] == (0.0, 0.0)]
    require_known(records, plain + [o for o in objectives if priceless and o.name == "epoch_usd"])


def _goal(objective: Objective, records: Sequence[TrialRecord]) -> Goal:
    speed_power, size_power = POWERS[objective.name]
    values = [objective.value(record) for record in records]
    up = objective.direction is Direction.MAXIMIZE
    factors = []
    for value, record in zip(values, records, strict=True):
        evidence = record.outcome.prediction
        assert evidence is not None
        base = evidence.speed.samples_per_s**speed_power
        base *= float(evidence.memory.device_bytes) ** size_power
        worth = 0.0 if not value else value if up else 1.0 / value
        factors.append(worth / base)
    return Goal(objective.name, np.array(factors), speed_power, size_power)


def _as_if(configuration: Configuration, prediction: Prediction) -> TrialRecord:
    return TrialRecord(
        trial_id="",
        space="",
        gpu=prediction.gpu,
        gpu_memory_bytes=prediction.budget.limit_bytes,
        configuration=configuration,
        outcome=Outcome(Status.OK, prediction=prediction),
        seed=0,
        started_at="",
        versions={},
        searcher="",
    )


class GoalFront:
    """The front of candidates known to fit, over any number of goals, and gains over it.

    The hypervolume down to 0 is the average, over directions, of the front's reach along each
    (Zhang and Golovin 2020), here over `DIRECTIONS` fixed ones; gains are shares of it.
    """

    def __init__(
        self, goals: Sequence[Goal], places: NDArray[np.intp], speed: Floats, size: Floats
    ) -> None:
        """The front of the candidates at `places`, which have this throughput and memory."""
        self._goals = goals
        self._scale = np.array([max(goal.factor.max(), 1e-300) for goal in goals])
        worth = self._worth(places, np.log(speed), np.log(size))
        # The unit is the best value of each goal; without a front, that of the best candidate.
        self._unit = worth.max(axis=0, initial=0.0)
        self._reach = self._reaches(worth).max(axis=0, initial=0.0)
        self.best = float(worth[:, 0].max(initial=0.0))

    def expected_gain(
        self, places: NDArray[np.intp], speed: LogNormal, size: LogNormal
    ) -> tuple[Floats, Floats]:
        """Expected shares that each candidate adds: to the hypervolume, and to the best first goal.

        Without a front, all of a candidate's value counts as gain.
        """
        volume, first = np.zeros(len(places)), np.zeros(len(places))
        if not self._unit.any():
            self._unit = self._worth(places, speed.mean, size.mean).max(axis=0, initial=0.0)
        whole = float(self._reach.mean()) or 1.0
        for (z, weight), (y, other) in itertools.product(self._nodes(0), self._nodes(1)):
            worth = self._worth(places, speed.mean + z * speed.sd, size.mean + y * size.sd)
            more = np.maximum(self._reaches(worth) - self._reach, 0.0).mean(axis=1)
            volume += weight * other * more / whole
            first += weight * other * np.maximum(worth[:, 0] - self.best, 0.0)
        return volume, first / (self.best or 1.0)

    def _nodes(self, of: int) -> Sequence[tuple[float, float]]:
        """Nodes to integrate over throughput (0) or memory (1); one if no goal depends on it."""
        powers = [(goal.speed_power, goal.size_power)[of] for goal in self._goals]
        return NODES if any(powers) else ((0.0, 1.0),)

    def _worth(self, places: NDArray[np.intp], speed: Floats, size: Floats) -> Floats:
        """Scaled goals from logarithms of throughput and memory, shape (places, goals)."""
        columns = [
            goal.factor[places] / scale * np.exp(goal.speed_power * speed + goal.size_power * size)
            for goal, scale in zip(self._goals, self._scale, strict=True)
        ]
        return np.stack(columns, axis=1)

    def _reaches(self, worth: Floats) -> Floats:
        """The reach of each point along each direction, to the power of the number of goals."""
        number = len(self._goals)
        directions, unit = _directions(number), np.maximum(self._unit, 1e-300)
        reach = worth[:, :1] / unit[0] / directions[None, :, 0]
        for goal in range(1, number):
            own = worth[:, goal, None] / unit[goal] / directions[None, :, goal]
            np.minimum(reach, own, out=reach)
        return np.asarray(reach**number)


@functools.cache
def _directions(number: int) -> Floats:
    """Evenly spread unit vectors with positive entries, shape (DIRECTIONS, number)."""
    from scipy.stats import norm, qmc

    points = qmc.Sobol(number, scramble=True, rng=0).random(DIRECTIONS)
    vectors = np.abs(norm.ppf(np.clip(points, 1e-6, 1 - 1e-6)))
    vectors = np.maximum(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), 1e-3)
    return np.asarray(vectors)
