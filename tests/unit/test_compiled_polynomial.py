"""Sizes found from two probes: exact everywhere, and refused where no polynomial fits."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.core.records import Configuration
from tuner.cost.polynomial import NotPolynomialError, Polynomial, Probe, Terms, fit
from tuner.predict.compiler.structure import Structure

PLAIN = Configuration(
    {"micro_batch": 4, "max_length": 512, "lora_rank": 8, "attention": "sdpa", "precision": "bf16"}
)


def structure(*, window: int | None = None, **changes: object) -> Structure:
    configuration = PLAIN.replace(**changes)
    return Structure.of(configuration, window=window, compute_capability=(8, 0))


STRUCTURES = {
    "plain": structure(),
    "within a window": structure(window=1024),
    "within a small window": structure(window=512, max_length=500),
    "beyond a window": structure(window=1024, max_length=2048),
    "single sample": structure(micro_batch=1),
    "full training": structure(lora_rank=0),
    "single sample, full training": structure(micro_batch=1, lora_rank=0, max_length=64),
    "negatives": structure(n_negatives=24),
}

points = st.builds(
    Probe,
    micro_batch=st.integers(1, 64),
    max_length=st.integers(1, 16384),
    lora_rank=st.integers(1, 1024),
    n_negatives=st.integers(0, 64),
)
exponents = st.tuples(*(st.integers(0, most) for most in (1, 2, 1, 1)))
# Dimensions of real models: hidden sizes, heads, vocabularies, and item sizes.
factors = st.one_of(st.integers(1, 64), st.sampled_from([576, 2048, 5376, 14336, 152064, 262208]))


def visible(powers: tuple[int, ...], probes: tuple[Probe, Probe]) -> tuple[int, ...]:
    """The exponents without those of variables that a structure keeps constant."""
    return tuple(
        power if one != other else 0
        for power, one, other in zip(powers, probes[0].values, probes[1].values, strict=True)
    )


def at(point: Probe, like: tuple[Probe, Probe]) -> Probe:
    """A point with the variables that a structure keeps constant as in its probes."""
    first, second = like
    values = zip(point.values, first.values, second.values, strict=True)
    return Probe(*(own if one != other else one for own, one, other in values))


def require_recovered(name, size, point):
    """What is fitted to two probes of a structure is right elsewhere too."""
    probes, check = STRUCTURES[name].probes()
    found = fit((size(probes[0]), size(probes[1])), probes)
    for probe in (check, at(point, probes)):
        assert found(probe) == size(probe)


@pytest.mark.parametrize("name", STRUCTURES)
@given(factor=factors, powers=exponents, point=points)
def test_a_monomial_is_recovered_from_two_probes(name, factor, powers, point):
    powers = visible(powers, STRUCTURES[name].probes()[0])
    require_recovered(name, lambda probe: factor * probe.monomial(powers), point)


@pytest.mark.parametrize("name", STRUCTURES)
@given(
    factor=factors,
    batch=st.integers(0, 1),
    rank=st.integers(0, 1),
    packed=st.integers(0, 1),
    shift=st.sampled_from([-1, 1]),
    point=points,
)
def test_a_length_that_is_one_off_is_recovered(name, factor, batch, rank, packed, shift, point):
    """Losses of older versions drop the last position; masks and packed rows may have one more."""

    def size(probe):
        rows = probe.lora_rank**rank * (1 if packed else probe.micro_batch**batch)
        return factor * rows * (probe.max_length * probe.micro_batch**packed + shift)

    require_recovered(name, size, point)


@given(
    factor=factors,
    batch=st.integers(0, 1),
    length=st.integers(0, 1),
    beside=st.sampled_from([1, 2]),
    point=points,
)
def test_candidates_beside_the_negatives_are_recovered(factor, batch, length, beside, point):
    """The positive is compared with the negatives; experts see the anchor too."""

    def size(probe):
        rows = probe.micro_batch**batch * probe.max_length**length
        return factor * rows * (probe.n_negatives + beside)

    require_recovered("negatives", size, point)


def test_every_pair_of_monomials_differs_in_its_probes():
    """Two sizes with the same values at both probes would be taken for one."""
    for found in STRUCTURES.values():
        probes, _ = found.probes()
        ratios = {}
        for powers in product(range(3), range(3), range(3), range(2)):
            if visible(powers, probes) != powers:
                continue
            ratio = Fraction(probes[0].monomial(powers), probes[1].monomial(powers))
            assert ratios.setdefault(ratio, powers) == powers


def test_knobs_of_size_and_of_the_optimizer_are_no_structure():
    same = structure(micro_batch=9, max_length=700, lora_rank=33, optimizer="sgd", grad_accum=7)
    assert same == structure()
    assert same.key == structure().key
    others = [
        structure(micro_batch=1),
        structure(lora_rank=0),
        structure(precision="nf4"),
        structure(attention="eager"),
        structure(window=512),
    ]
    assert structure(n_negatives=8) == structure(n_negatives=24) != structure(n_negatives=1)
    assert len({structure().key, *(other.key for other in others)}) == len(others) + 1


PROBES = STRUCTURES["plain"].probes()[0]


@pytest.mark.parametrize("values", [(7, 13), (1, 0), (0, 1), (101, 103), (10**9 + 7, 10**9 + 9)])
def test_values_that_no_polynomial_explains_are_refused(values):
    with pytest.raises(NotPolynomialError, match=str(values[0])):
        fit(values, PROBES)


def test_a_length_rounded_up_is_refused_or_fits_both_probes():
    """A size that steps with the length has no polynomial; two values cannot show more."""
    steps = [-(-probe.max_length // 100) * 100 * probe.micro_batch for probe in PROBES]
    with pytest.raises(NotPolynomialError):
        fit((steps[0] * 3, steps[1] * 3), PROBES)


@given(
    terms=st.lists(
        st.lists(st.tuples(factors, exponents), min_size=1, max_size=2), min_size=1, max_size=8
    ),
    places=st.lists(points, min_size=1, max_size=5),
)
def test_arrays_evaluate_as_the_polynomials_do(terms, places):
    polynomials = [Polynomial(tuple((Fraction(c), e) for c, e in pair)) for pair in terms]
    where = np.array([place.values for place in places], dtype=float)
    values = Terms.of(polynomials).at(where)
    expected = [[float(polynomial(place)) for place in places] for polynomial in polynomials]
    np.testing.assert_allclose(values, expected, rtol=1e-12)
