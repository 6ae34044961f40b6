"""Errors of predictions, learned from few measurements: a posterior on a small grid.

The model, for one quantity on one GPU with one workload:

    log(measured / predicted) = bias + spread * t,    t from Student's t, 4 degrees of freedom

`bias` is what all predictions there have in common, `spread` is the scale of what remains.
Step times also have a fixed cost, added to `predicted` for each micro-step: the time that
Python and the data take, which short steps show and long ones hide.
Errors of sizes and times are ratios, so their logarithms are modelled; a correction is then one
factor, and no interval reaches below zero.

Student's t instead of a normal distribution, because some measurements are wrong in ways of
their own (a shared GPU, a clock that dropped, a first step): an outlier's pull on the bias
falls off with its distance, where under a normal law it grows (Lange, Little and Taylor,
"Robust statistical modeling using the t distribution", JASA 1989, who recommend 4 degrees of
freedom for small samples). The prior of the bias is a Student's t for the same reason: several
measurements that agree overrule a prior they contradict. With 4 degrees of freedom the
distribution function has a closed form, so that nothing but numpy is needed.

An out-of-memory error says only "at least this much". Such a bound enters as the probability
of everything beyond it (a censored observation), so it widens or shifts the posterior as far
as it contradicts the prediction, and hardly otherwise.

The interval of predicted memory goes by what is not known of it: in bytes, part by part.

Device memory is allocated blocks, what PyTorch's allocator holds beside them (the *gap*), and the
CUDA context. Allocated memory is counted; the gap depends on the order of requests and on what an
allocator did before, so that it can be half as large or half as large again; a context differs
between drivers by some tens of MiB, whatever the training. So a training whose gap is small has a
narrow interval. An end is the prediction plus the root of the summed squares of what each part may
be off by, and a `Doubt` adds a share of the whole: an interval never gets narrower with a doubt.

Near the limit the allocator returns its free blocks before it gives up. Where the upper end passes
the limit, the lower one is therefore what is allocated, with the context.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tuner.core.kinds import Doubt

if TYPE_CHECKING:  # it imports msgspec, which an emulated program may not have
    from tuner.core.records import Memory

Floats = NDArray[np.float64]

COVERAGE = 0.90
"""Share of measurements that an interval is meant to contain; half of the rest is above it."""

_DEGREES = 4
_BIAS_POINTS, _SPREAD_POINTS, _TABLE_POINTS = 81, 15, 241
_SPREAD_STEPS = np.linspace(-3.5, 3.5, _SPREAD_POINTS)
"""Grid points of log(spread), in standard deviations."""
_NEGLIGIBLE = 1e-5
"""Weight, relative to the largest, below which a grid point does not count."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One prediction and what is known of the truth, both in the same unit.

    `measured` is the value itself. Without it, `at_least` and `at_most` bound it: device memory
    was at least the GPU's when it ran out, and at most that when the trial fitted. `units` is
    how often a fixed cost occurs in it: the micro-steps of a step time.
    Raises ValueError unless there is a value or a bound, all of them above zero and finite.
    """

    quantity: str
    predicted: float
    measured: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    units: float = 1.0

    def __post_init__(self) -> None:
        known = [v for v in (self.measured, self.at_least, self.at_most) if v is not None]
        if not known:
            raise ValueError(f"{self.quantity}: neither a measured value nor a bound")
        for value in (self.predicted, *known):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{self.quantity}: {value!r} is not a number above zero")
        if None not in (self.at_least, self.at_most) and not self.at_least < self.at_most:  # type: ignore[operator]
            raise ValueError(f"{self.quantity}: {self.at_least} is not below {self.at_most}")


@dataclass(frozen=True, slots=True)
class ErrorPrior:
    """The prior of a GPU and workload without measurements.

    All in logarithms of measured over predicted: `bias` has the scale `bias_scale` around 0;
    `spread` is the median of the scale within a GPU and workload, and `spread_sd` the standard
    deviation of its logarithm. `source` says from what rows they come.

    `least_spread` is the scale that remains however well trials agree: what identical runs
    differ by, and what configurations of another kind than those measured would add. Without
    it, a few trials of one kind that agree to four digits would promise that for all kinds.
    `fixed_cost` is the scale of what each unit may cost in addition, in the unit of the
    prediction; 0 where there is no such cost.
    """

    bias_scale: float
    spread: float
    spread_sd: float
    least_spread: float
    source: str
    fixed_cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """The median and the ends of the 90 % interval, in the unit of the prediction."""

    low: float
    median: float
    high: float


class Calibration:
    """Scatter of measured values of one quantity around predictions; see the module.

    Immutable. The same observations in another order give the same calibration.
    """

    def __init__(
        self, bias: Floats, spread: Floats, weight: Floats, *, count: int, fixed_cost: float
    ) -> None:
        """From points of a posterior and their weights, which need not add up to 1."""
        kept = weight > _NEGLIGIBLE * weight.max()
        self._bias, self._spread = bias[kept], spread[kept]
        self._weight = weight[kept] / weight[kept].sum()
        self._table = self._tabulate()
        tail = (1 - COVERAGE) / 2
        places, cumulative = self._table
        quantiles = np.interp((tail, 0.5, 1 - tail), cumulative, places).tolist()
        self.factors = Interval(*map(math.exp, quantiles))
        """Measured over predicted (with fixed costs): what `correct` multiplies by."""
        self.count = count
        """Observations that were learned from."""
        self.fixed_cost = fixed_cost
        """Cost of every unit in addition to the prediction, before the factor."""

    @classmethod
    def fit(cls, observations: Iterable[Observation], prior: ErrorPrior) -> Calibration:
        """The posterior after observations of one quantity; without any, the prior."""
        observations = list(observations)
        fixed_cost = _likely_cost(observations, prior)
        data, bias_axis, spread_axis = _grid(observations, prior, fixed_cost)
        weight = _relative(_log_posterior(bias_axis, spread_axis, data, prior))
        if data:  # again, with the points where the first pass found the spread to be
            log_spread, share = np.log(spread_axis), weight.sum(axis=0) / weight.sum()
            mean = float(share @ log_spread)
            deviation = math.sqrt(float(share @ (log_spread - mean) ** 2))
            steps = max(deviation, 0.1 * prior.spread_sd) * _SPREAD_STEPS
            spread_axis = np.maximum(np.exp(mean + steps), prior.least_spread)
            weight = _relative(_log_posterior(bias_axis, spread_axis, data, prior))
        bias, spread = np.meshgrid(bias_axis, spread_axis, indexing="ij")
        return cls(
            bias.ravel(), spread.ravel(), weight.ravel(), count=len(data), fixed_cost=fixed_cost
        )

    def correct(self, predicted: float, *, units: float = 1.0) -> Interval:
        """The interval of the measured value of a quantity predicted as `predicted`."""
        factors, base = self.factors, predicted + self.fixed_cost * units
        return Interval(base * factors.low, base * factors.median, base * factors.high)

    def probabilities_above(self, predicted: Floats, limit: float) -> Floats:
        """The probability of each that its measured value exceeds `limit`, for one unit."""
        places, cumulative = self._table
        ratios = np.log(limit / (predicted + self.fixed_cost))
        above: Floats = 1.0 - np.interp(ratios, places, cumulative)
        return above

    def _tabulate(self) -> tuple[Floats, Floats]:
        """The predictive distribution function of log(measured / predicted), at many places."""
        centre = float(self._weight @ self._bias)
        scale = float(self._weight @ (self._spread + np.abs(self._bias - centre)))
        # Dense in the middle, and far enough out that what is beyond does not matter.
        places = centre + scale * np.sinh(np.linspace(-5.0, 5.0, _TABLE_POINTS))
        cumulative = np.zeros(_TABLE_POINTS)
        for part in np.array_split(np.arange(self._bias.size), self._bias.size // 1024 + 1):
            t = (places[:, None] - self._bias[part]) / self._spread[part]
            cumulative += _below(t) @ self._weight[part]
        return places, np.maximum.accumulate(cumulative)


def in_quadrature(*ends: tuple[float, float]) -> tuple[float, float]:
    """The ends of a product of independent factors, from the lower and upper end of each.

    They are hardly ever all at their worst together: logarithms add as squares, as those of
    independent errors do.
    """
    low = math.hypot(*(math.log(low) for low, _ in ends))
    return math.exp(-low), math.exp(math.hypot(*(math.log(high) for _, high in ends)))


def _log_ratios(observation: Observation, fixed_cost: float) -> tuple[float, float]:
    """The interval of log(measured / predicted) that was observed; both ends equal for a value."""
    predicted = observation.predicted + fixed_cost * observation.units
    if observation.measured is not None:
        exact = math.log(observation.measured / predicted)
        return exact, exact
    low, high = observation.at_least, observation.at_most
    return (
        -math.inf if low is None else math.log(low / predicted),
        math.inf if high is None else math.log(high / predicted),
    )


def _likely_cost(observations: Sequence[Observation], prior: ErrorPrior) -> float:
    """The most probable fixed cost, of none and powers of two around the prior's scale.

    One value instead of a third axis of the grid: nearly all of what is uncertain about it is
    in the spread already, and the evidence leaves it at 0 until several trials ask for more.
    """
    if not prior.fixed_cost or not observations:
        return 0.0
    costs = [0.0, *(prior.fixed_cost * 2.0**power for power in range(-3, 4))]
    return max(
        costs,
        key=lambda cost: (
            float(_log_density(np.array(cost / prior.fixed_cost)))
            + log_evidence(observations, prior, fixed_cost=cost)
        ),
    )


def _bias_axis(data: Sequence[tuple[float, float]], prior: ErrorPrior) -> Floats:
    """Places for the bias: dense around 0 and the data's centre, sparse where neither is."""
    ends = [end for pair in data for end in pair if math.isfinite(end)]
    values = [(low + high) / 2 for low, high in data if math.isfinite(high - low)]
    reach = max([abs(end) for end in ends], default=0.0) + 20 * prior.bias_scale
    # The narrowest posterior to be resolved: the scale of the mean of all values.
    finest = prior.spread * math.exp(-2 * prior.spread_sd) / math.sqrt(len(data) + 1)
    around = [0.0] + ([float(np.median(values))] if values else [])
    span = math.asinh(reach / finest)
    offsets = finest * np.sinh(np.linspace(-span, span, _BIAS_POINTS))
    return np.unique(np.concatenate([centre + offsets for centre in around]))


def _grid(
    observations: Iterable[Observation], prior: ErrorPrior, fixed_cost: float
) -> tuple[list[tuple[float, float]], Floats, Floats]:
    """The log ratios, and places for the bias and the spread."""
    # Sorted, so that sums do not depend on the order of arrival, not even in the last bit.
    data = sorted(_log_ratios(o, fixed_cost) for o in observations)
    spread_axis = prior.spread * np.exp(prior.spread_sd * _SPREAD_STEPS)
    return data, _bias_axis(data, prior), np.maximum(spread_axis, prior.least_spread)


def _log_posterior(
    bias_axis: Floats, spread_axis: Floats, data: Sequence[tuple[float, float]], prior: ErrorPrior
) -> Floats:
    """Log weight of each point, shape (biases, spreads): the share of its cell in the bias."""
    bias, spread = bias_axis[:, None], spread_axis[None, :]
    log_weight = _log_density(bias / prior.bias_scale) + np.log(np.gradient(bias_axis))[:, None]
    # Points of the spread are equally far apart in its logarithm: no width to weigh by.
    log_weight = log_weight - 0.5 * (np.log(spread / prior.spread) / prior.spread_sd) ** 2
    for low, high in data:
        log_weight += _log_likelihood(low, high, bias, spread)
    return log_weight


def _relative(log_weight: Floats) -> Floats:
    weight: Floats = np.exp(log_weight - log_weight.max())
    return weight


def log_evidence(
    observations: Iterable[Observation], prior: ErrorPrior, *, fixed_cost: float = 0.0
) -> float:
    """Log probability (density) of the observations under the prior, up to a constant.

    For choosing a prior: the one under which rows of several GPUs are the most probable.
    """
    data, bias_axis, spread_axis = _grid(observations, prior, fixed_cost)
    with_data = _log_posterior(bias_axis, spread_axis, data, prior)
    without = _log_posterior(bias_axis, spread_axis, (), prior)
    return _log_sum(with_data) - _log_sum(without)


def _log_sum(log_weight: Floats) -> float:
    return float(log_weight.max() + np.log(_relative(log_weight).sum()))


def _log_likelihood(low: float, high: float, bias: Floats, spread: Floats) -> Floats:
    """Log density at a value (`low` equals `high`), or log probability between two bounds."""
    if low == high:
        density: Floats = _log_density((low - bias) / spread) - np.log(spread)
        return density
    from_low, from_high = (low - bias) / spread, (high - bias) / spread
    # From the side on which both are in the tail, so that small differences survive.
    inside = np.where(
        from_low > 0, _below(-from_low) - _below(-from_high), _below(from_high) - _below(from_low)
    )
    return np.log(np.maximum(inside, 1e-300))


def _log_density(t: Floats) -> Floats:
    """Log density of Student's t with 4 degrees of freedom, up to a constant."""
    density: Floats = -(_DEGREES + 1) / 2 * np.log1p(t * t / _DEGREES)
    return density


def _below(t: Floats) -> Floats:
    """Distribution function of Student's t with 4 degrees of freedom.

    With s = t / sqrt(4 + t^2) it is (1 + s)^2 (2 - s) / 4 (integrate the density after this
    substitution). 1 + s is computed without cancellation where t is far below zero.
    """
    with np.errstate(invalid="ignore"):
        root = np.sqrt(_DEGREES + t * t)
        s = np.where(np.isinf(t), np.sign(t), t / root)
        one_more = np.where(t < 0, _DEGREES / (root * (root - t)), 1.0 + s)
    below: Floats = one_more * one_more * (2.0 - s) / 4.0
    return below


Ends = tuple[float, float]
"""Lower and upper end of an interval."""


@dataclass(frozen=True, slots=True)
class Share:
    """Shares by which a size is off at its lower and upper end, and allocated memory at each."""

    below: float
    above: float
    allocated: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryErrors:
    """The errors of each part of predicted memory at the ends of the 90 % interval.

    What is learned was printed by `python -m benchmarks.accuracy.memory_intervals`.
    """

    allocated: float = 0.008
    """Share of allocated memory: gaps left by loading 4-bit weights change 0.1 to 0.8 %."""
    context: float = 0.2
    """Share of the CUDA context: published readings of one GPU type differ by up to 20 % from the
    catalogue's (A100: 409 to 503 MiB, RTX 3090: 255 to 420, RTX 5090: 499 to 595)."""
    gap_below: float = 0.18
    """Share of the gap, learned from 70 plain runs of grade A: 3 programs on 3 GPU types."""
    gap_above: float = 0.71
    least_gap: float = 0.03
    """Share of reserved memory that a gap counts as at least: no plain run has one below 2.7 %."""
    doubts: Mapping[Doubt, Share] = field(
        default_factory=lambda: {
            # The 90 % of 120 configurations that were replayed too (docs/notebook/how-it-works.md).
            Doubt.ESTIMATED: Share(0.084, 0.042),
            # 29 runs; allocated memory was up to 2.2 % less than predicted.
            Doubt.KERNELS: Share(0.03, 0.19, 0.025),
            # The interval of the prior, of all programs alike (`calibrate.prior_of`).
            Doubt.UNCOMPARED: Share(0.134, 0.155, 0.013),
            # transformers 5.12 needs 7 % more than 5.23 for one configuration; 17 runs with 4.49
            # needed 1 to 5 % less than is predicted for it.
            Doubt.RELEASES: Share(0.07, 0.07, 0.07),
            # 21 runs of 2019 to 2022.
            Doubt.OLD_RELEASES: Share(0.07, 0.85, 0.07),
        }
    )

    def ends(
        self,
        memory: Memory,
        *,
        limit_bytes: int | None = None,
        measured_context: bool = False,
        doubts: Collection[Doubt] = (),
    ) -> tuple[Ends, Ends, Ends]:
        """Bytes at the ends of device, reserved and allocated memory."""
        shares = [self.doubts[doubt] for doubt in doubts]
        allocated = memory.peak_allocated_bytes
        gap = memory.peak_reserved_bytes - allocated
        context = memory.device_bytes - memory.peak_reserved_bytes
        counted = self.allocated * allocated
        uncertain = max(gap, round(self.least_gap * memory.peak_reserved_bytes))

        def above(size: int, *parts: float) -> float:
            return math.hypot(
                counted, self.gap_above * uncertain, *(s.above * size for s in shares), *parts
            )

        def below(size: int, *parts: float) -> float:
            off = math.hypot(counted, *(s.below * size for s in shares), *parts)
            usual = math.hypot(off, self.gap_below * uncertain)
            return max(usual, gap + off) if is_short else usual

        context_off = 0.0 if measured_context else self.context * context
        device, reserved = memory.device_bytes, memory.peak_reserved_bytes
        high = device + above(device, context_off)
        is_short = limit_bytes is not None and high > limit_bytes
        off = math.hypot(counted, *(s.allocated * allocated for s in shares))
        return (
            (device - below(device, context_off), high),
            (reserved - below(reserved), reserved + above(reserved)),
            (allocated - off, allocated + off),
        )


MEMORY_ERRORS = MemoryErrors()
