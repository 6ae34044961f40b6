"""Sizes as polynomials in micro-batch, length, rank and negatives, from a few traced values.

A tensor's size is a product of dimensions, and each dimension is a constant, one of the
variables, or a product of them. Two probes whose ratios are distinct fractions of primes
therefore determine the monomial, and its coefficient follows. Sizes with a sum in them (a
length shortened by one, a positive beside the negatives) take two monomials.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

Exponents = tuple[int, ...]
"""Powers of (micro-batch, length, rank, negatives)."""


VARIABLES = 4


@dataclass(frozen=True, slots=True)
class Probe:
    """One point at which a workload is traced."""

    micro_batch: int
    max_length: int
    lora_rank: int
    n_negatives: int = 0

    @property
    def values(self) -> tuple[int, int, int, int]:
        """The variables in the order of `Exponents`."""
        return self.micro_batch, self.max_length, self.lora_rank, self.n_negatives

    def monomial(self, exponents: Exponents) -> int:
        """The product of the variables, each to its power."""
        return math.prod(v**power for v, power in zip(self.values, exponents, strict=False))


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of at most two monomials with whole or fractional coefficients."""

    terms: tuple[tuple[Fraction, Exponents], ...]

    @classmethod
    def of(cls, value: int) -> Polynomial:
        """A constant."""
        return cls(((Fraction(value), (0,) * VARIABLES),))

    @classmethod
    def sum(cls, polynomials: Iterable[Polynomial]) -> Polynomial:
        """The sum of polynomials, which together have at most two monomials."""
        found: dict[Exponents, Fraction] = {}
        for polynomial in polynomials:
            for coefficient, exponents in polynomial.terms:
                found[exponents] = found.get(exponents, Fraction(0)) + coefficient
        return cls(tuple((coefficient, exponents) for exponents, coefficient in found.items()))

    def __call__(self, probe: Probe) -> Fraction:
        """The exact value at a point."""
        return sum((c * probe.monomial(e) for c, e in self.terms), Fraction(0))


class NotPolynomialError(ValueError):
    """Two values that no polynomial of the family explains."""


_EXPONENTS: tuple[Exponents, ...] = tuple(
    sorted(product(range(3), range(3), range(3), range(2)), key=lambda e: (sum(e), e))
)


def fit(values: tuple[int, int], probes: tuple[Probe, Probe]) -> Polynomial:
    """The polynomial with these values at the two probes.

    A single monomial where one fits, else one with a length, or a row of packed examples, longer
    or shorter by one. No other sums: two values would let too many of them pass. Raises
    `NotPolynomialError`.
    """
    return _fit(values, probes)


@cache
def _fit(values: tuple[int, int], probes: tuple[Probe, Probe]) -> Polynomial:
    first, second = values
    if first == second:
        return Polynomial.of(first)
    usable = _usable(probes)
    for exponents, at_first, at_second in usable:
        if first * at_second == second * at_first:
            return Polynomial(((Fraction(first, at_first), exponents),))
    shifted = _shifted(values, usable)
    if shifted is None:
        raise NotPolynomialError(f"{first} and {second} at {probes[0]} and {probes[1]}")
    return shifted


def _shifted(
    values: tuple[int, int], usable: Sequence[tuple[Exponents, int, int]]
) -> Polynomial | None:
    """A monomial in which one dimension is shifted: c b (s - 1), c b (n + 2), or c (b s + 1).

    The last position of a sequence has no token to predict, so some losses drop it; anchors and
    positives stand beside the negatives; a packed row has one more end of examples than tokens.
    """
    first, second = values
    monomials = {exponents: (at_first, at_second) for exponents, at_first, at_second in usable}
    for (low, (low_1, low_2)), (dimension, shifts) in product(monomials.items(), _SHIFTS):
        high = tuple(power + more for power, more in zip(low, dimension, strict=True))
        if high not in monomials:
            continue
        high_1, high_2 = monomials[high]
        for shift in shifts:
            if first * (high_2 + shift * low_2) == second * (high_1 + shift * low_1):
                factor = Fraction(first, high_1 + shift * low_1)
                return Polynomial(((shift * factor, low), (factor, high)))
    return None


_SHIFTS: tuple[tuple[Exponents, tuple[int, ...]], ...] = (
    ((0, 1, 0, 0), (-1, 1)),
    ((0, 0, 0, 1), (1, 2)),
    ((1, 1, 0, 0), (-1, 1)),
)
"""Dimensions that stand in sums with a constant, and the constants."""


@cache
def _usable(probes: tuple[Probe, Probe]) -> tuple[tuple[Exponents, int, int], ...]:
    """Monomials that can be told apart: variables equal in both probes stay out."""
    first, second = probes
    fixed = tuple(one == two for one, two in zip(first.values, second.values, strict=True))
    return tuple(
        (exponents, first.monomial(exponents), second.monomial(exponents))
        for exponents in _EXPONENTS
        if not any(power and same for power, same in zip(exponents, fixed, strict=True))
    )


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """Many polynomials as arrays, evaluated at many points at once.

    `coefficients` has shape (n, 2), `exponents` (n, 2, 4); unused terms have coefficient 0.
    """

    coefficients: Any
    exponents: Any

    def is_consistent(self) -> bool:
        """Check that the arrays belong together."""
        shape = (len(self.coefficients), 2)
        return bool(
            self.coefficients.shape == shape
            and self.exponents.shape == (*shape, VARIABLES)
            and ((self.exponents >= 0) & (self.exponents <= 2)).all()
        )

    @classmethod
    def of(cls, polynomials: Sequence[Polynomial]) -> Terms:
        """Arrays for these polynomials, in their order."""
        import numpy as np

        coefficients = np.zeros((len(polynomials), 2))
        exponents = np.zeros((len(polynomials), 2, VARIABLES), dtype=np.int8)
        for row, polynomial in enumerate(polynomials):
            for column, (coefficient, powers) in enumerate(polynomial.terms):
                coefficients[row, column] = float(coefficient)
                exponents[row, column] = powers
        return cls(coefficients, exponents)

    def at(self, points: Any) -> Any:
        """Values of shape (n, points) for `points` of shape (points, 4) as float64.

        Points without negatives may leave the last variable out.
        """
        import numpy as np

        powers = np.stack([np.ones_like(points), points, points**2])  # (power, point, variable)
        values = np.zeros((len(self.coefficients), len(points)))
        for column in range(2):
            exponents = self.exponents[:, column, :]
            monomials = np.ones_like(values)
            for variable in range(points.shape[1]):
                monomials *= powers[exponents[:, variable], :, variable]
            values += self.coefficients[:, column, None] * monomials
        return values
