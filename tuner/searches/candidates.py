"""The finite set of valid configurations, as points for a sampler.

Optuna knows only boxes of parameters, and the valid configurations are a subset of a box. A
sampler's proposal is therefore moved to the nearest valid configuration that has not been tried.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from tuner.core.records import Configuration, KnobValue

Parameter = bool | int | float | str

LOG_RATIO = 8.0
"""A knob gets a logarithmic scale if its largest value is at least this many times its smallest.

Doubling a micro-batch or a rank is the same step from any value.
"""

MIN_ORDERED_VALUES = 3
"""A numeric knob with fewer values than this is a category: two values have no order to learn."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """One knob that has more than one value among the candidates."""

    name: str
    distribution: BaseDistribution
    codes: Mapping[Parameter, float]
    """Coordinate of each value: a position in 0..1 when ordered, else the category's index."""
    ordered: bool

    def coordinate(self, value: Parameter) -> float:
        """The coordinate of any value inside the distribution, valid or not."""
        if not self.ordered or value in self.codes:
            return self.codes[value]
        low, high = self.distribution.low, self.distribution.high
        if self.distribution.log:
            return float(np.log(value / low) / np.log(high / low))
        return float((value - low) / (high - low))


class Candidates:
    """All valid configurations of a search and which of them are still untried.

    Only knobs with more than one value among them become parameters. Raises ValueError when
    two configurations do not differ in any knob.
    """

    def __init__(self, configurations: Sequence[Configuration], knobs: Sequence[str]) -> None:
        self.configurations = tuple(configurations)
        self._index = {c.key: i for i, c in enumerate(self.configurations)}
        self.axes = tuple(
            _axis(name, values)
            for name in knobs
            if len(values := {parameter(c[name]): None for c in self.configurations}) > 1
        )
        found: dict[tuple[Parameter, ...], Configuration] = {}
        for configuration in self.configurations:
            key = tuple(self.parameters(configuration).values())
            other = found.setdefault(key, configuration)
            if other is not configuration:
                raise ValueError(f"{configuration!r} and {other!r} differ in no knob")
        self._points: npt.NDArray[np.float64] = np.array(
            [
                [axis.codes[parameter(c[axis.name])] for axis in self.axes]
                for c in self.configurations
            ]
        ).reshape(len(self.configurations), len(self.axes))
        self._ordered = np.array([axis.ordered for axis in self.axes], dtype=bool)
        self._untried = np.ones(len(self.configurations), dtype=bool)
        self._held_back = np.zeros(len(self.configurations), dtype=bool)

    def __len__(self) -> int:
        return len(self.configurations)

    def __contains__(self, configuration: Configuration) -> bool:
        return configuration.key in self._index

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The box that a sampler sees: one Optuna distribution per knob that varies."""
        return {axis.name: axis.distribution for axis in self.axes}

    @property
    def coordinates(self) -> dict[str, npt.NDArray[np.float64]]:
        """The positions in 0..1 of all candidates along each ordered knob."""
        ordered = [(i, axis.name) for i, axis in enumerate(self.axes) if axis.ordered]
        return {name: self._points[:, i] for i, name in ordered}

    @property
    def untried_count(self) -> int:
        """Number of candidates that are neither taken nor held back."""
        return int(self._open.sum())

    @property
    def remaining_count(self) -> int:
        """Number of candidates that are not taken, including those held back."""
        return int(self._untried.sum())

    @property
    def columns(self) -> dict[str, list[Parameter]]:
        """The values of each knob that varies, one for each candidate."""
        return {
            axis.name: [
                parameter(configuration[axis.name]) for configuration in self.configurations
            ]
            for axis in self.axes
        }

    def is_untried(self, configuration: Configuration) -> bool:
        """True for a candidate that is neither taken nor held back."""
        index = self._index.get(configuration.key)
        return index is not None and bool(self._open[index])

    @property
    def left(self) -> npt.NDArray[np.bool_]:
        """Mask of the candidates that are not taken, including those held back."""
        return self._untried

    def is_left(self, place: int) -> bool:
        """True if the candidate at `place` is not taken; it may be held back."""
        return bool(self._untried[place])

    def place(self, configuration: Configuration) -> int:
        """The index of the configuration in `configurations`. Raises KeyError for any other."""
        return self._index[configuration.key]

    def hold_back(self, mask: npt.NDArray[np.bool_]) -> None:
        """Hold back the candidates of `mask`, and no others."""
        self._held_back = mask

    def take(self, configuration: Configuration) -> None:
        """Mark the configuration as taken: it has been tried, or is about to be."""
        self._untried[self._index[configuration.key]] = False

    def untried(self) -> list[Configuration]:
        """The candidates that are neither taken nor held back, in the order of the space."""
        return [self.configurations[i] for i in np.flatnonzero(self._open)]

    def parameters(self, configuration: Configuration) -> dict[str, Parameter]:
        """The configuration as parameters of `distributions`."""
        return {axis.name: parameter(configuration[axis.name]) for axis in self.axes}

    def describe(self, place: int) -> str:
        """The knobs that vary, for people: "micro_batch=4 precision=nf4"."""
        parameters = self.parameters(self.configurations[place])
        return " ".join(f"{name}={value}" for name, value in parameters.items())

    def nearest_untried(
        self, proposed: Mapping[str, Parameter], rng: random.Random
    ) -> Configuration | None:
        """The untried candidate closest to the proposed parameters; None when none is left.

        The distance adds up, over the knobs, the step along an ordered knob as a share of
        its range, and 1 for each other category. Ties are drawn with `rng`.
        """
        if not self._open.any():
            return None
        point = np.array([axis.coordinate(proposed[axis.name]) for axis in self.axes])
        steps = np.abs(self._points - point)
        distance = np.where(self._ordered, steps, steps != 0).sum(axis=1)
        distance[~self._open] = np.inf
        # Rounding must not decide between equal steps of different knobs.
        closest = np.flatnonzero(distance <= distance.min() + 1e-9)
        return self.configurations[rng.choice(closest.tolist())]

    @property
    def _open(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self._untried & ~self._held_back)


def parameter(value: KnobValue) -> Parameter:
    """A knob value as Optuna stores it: a list of names becomes one text."""
    return "+".join(value) if isinstance(value, tuple) else value


def _axis(name: str, values: Mapping[Parameter, None]) -> _Axis:
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or len(numbers) < MIN_ORDERED_VALUES:
        choices = tuple(values)
        return _Axis(
            name=name,
            distribution=CategoricalDistribution(choices),
            codes={value: float(i) for i, value in enumerate(choices)},
            ordered=False,
        )
    low, high = min(numbers), max(numbers)
    log = low > 0 and high / low >= LOG_RATIO
    scale = np.log if log else float
    span = scale(high) - scale(low)
    whole = all(isinstance(v, int) for v in numbers)
    return _Axis(
        name=name,
        distribution=(
            IntDistribution(int(low), int(high), log=log)
            if whole
            else FloatDistribution(float(low), float(high), log=log)
        ),
        codes={v: float((scale(v) - scale(low)) / span) for v in numbers},
        ordered=True,
    )
