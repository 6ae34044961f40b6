"""A cumulative distribution as a polyline, and the integrals over it.

Two kinds of data end in one form: a histogram or quantiles rise along slopes, counted lengths
rise in jumps (two points at one length). Every formula below is exact for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cdf:
    """Fraction of examples of at most a length; `x` and `f` never fall, `f` goes from 0 to 1.

    `f` starts at 0, with a second point at the same length where the shortest example is a jump.
    """

    x: Floats
    f: Floats

    def at(self, length: float) -> float:
        """Fraction of examples with at most `length` tokens (right-continuous)."""
        i = int(np.searchsorted(self.x, length, side="right"))
        if i == 0:
            return 0.0
        if i == len(self.x):
            return 1.0
        rise = self.f[i] - self.f[i - 1]
        part = (length - self.x[i - 1]) / (self.x[i] - self.x[i - 1])
        return float(self.f[i - 1] + rise * part)

    def mean_of_max(self, draws: int, up_to: float) -> float:
        """E[min(M, up_to)] of the maximum M of independent `draws`.

        M is at most x when all draws are, so its distribution function is F(x)^draws, and the
        mean of a non-negative variable is the integral of 1 - F(x)^draws from 0 to `up_to`
        (order statistics: David and Nagaraja, Order Statistics, 3rd edition, section 2.1).
        """
        return self.survival(draws, 0, up_to)

    def survival(self, draws: int, start: float, end: float) -> float:
        """The integral of 1 - F(x)^draws from `start` to `end`."""
        end = min(end, float(self.x[-1]))
        if end <= start:
            return 0.0
        inside = (self.x > start) & (self.x < end)
        x = np.concatenate(([start], self.x[inside], [end]))
        f = np.concatenate(([self.at(start)], self.f[inside], [self._before(end)]))
        return float(end - start - np.sum(np.diff(x) * _mean_power(f[:-1], f[1:], draws)))

    def _before(self, length: float) -> float:
        """The limit of F from the left."""
        i = int(np.searchsorted(self.x, length, side="left"))
        if i == 0:
            return 0.0
        width = self.x[i] - self.x[i - 1]
        part = (length - self.x[i - 1]) / width
        return float(self.f[i - 1] + (self.f[i] - self.f[i - 1]) * part)


def cdf_of_counts(lengths: Floats, counts: Floats) -> Cdf:
    """The distribution of counted lengths, which must rise: a jump at each."""
    after = np.cumsum(counts) / np.sum(counts)
    before = np.concatenate(([0.0], after[:-1]))
    return Cdf(np.repeat(lengths, 2), np.column_stack((before, after)).ravel())


def _mean_power(low: Floats, high: Floats, power: int) -> Floats:
    """Mean of u^power for u uniform between `low` and `high`, each in [0, 1].

    (high^n - low^n) / (n (high - low)) with n = power + 1, written so that nothing cancels
    where the two are close: with d = 1 - low / high it is high^power (1 - (1 - d)^n) / (n d).
    """
    n = power + 1
    share = np.divide(high - low, high, out=np.zeros_like(high), where=high > 0)
    with np.errstate(divide="ignore"):  # log of 0 where low is 0: the power is then 0
        fallen = -np.expm1(n * np.log1p(-share))
    return np.asarray(
        high**power * np.divide(fallen, n * share, out=np.ones_like(share), where=share > 0),
        dtype=np.float64,
    )
