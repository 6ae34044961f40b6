"""What a trial may add: expected hypervolume and throughput, with the chance of no memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FAR = 4.0
"""Standard deviations beyond which nothing is expected."""


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
    """Places of those that no other is at least as fast as with no more memory, smallest first.

    Of equal ones the first stands for all.
    """
    order = np.lexsort((-speed, size))
    rising = np.diff(np.maximum.accumulate(speed[order]), prepend=-np.inf) > 0
    return np.asarray(order[rising])


@dataclass(frozen=True, slots=True)
class Front:
    """The staircase of what is known to fit: throughput rises with the memory it takes.

    `reference_bytes` is the memory at which the hypervolume ends, `usable_bytes` what may be
    taken; both are the same without a margin.
    """

    speed: Floats
    size: Floats
    usable_bytes: float
    reference_bytes: float

    @classmethod
    def of(
        cls, speed: Floats, size: Floats, *, usable_bytes: float, reference_bytes: float
    ) -> Front:
        """The non-dominated ones of those that fit, smallest first."""
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
        """The largest throughput on it; 0 when it is empty."""
        return float(self.speed.max(initial=0.0))

    def expected_gain(self, speed: LogNormal, size: LogNormal) -> Floats:
        """Expected hypervolume that each candidate adds, exact for independent objectives.

        The gain of a point is the integral over memory u from its own to the reference of
        max(0, its speed - the staircase at u). Its expectation is, on each step of the
        staircase, a product of two one-dimensional ones (after Emmerich, Deutz and
        Klinkenberg 2011). A candidate that takes more than is usable adds nothing. Nor does
        one that the staircase covers even if it turns out `FAR` standard deviations better.
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
        # Beyond what is usable the memory no longer matters, only that it was usable.
        rest = self.reference_bytes - self.usable_bytes
        return gain + above * rest * size.probability_below(self.usable_bytes)


def _below(z: Floats) -> Floats:
    from scipy.special import ndtr

    return np.asarray(ndtr(z))
