"""The posterior of errors: what is learned from values, bounds and outliers, and how sure it is."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.cost.interval import COVERAGE, Calibration, ErrorPrior, Observation, log_evidence

PRIOR = ErrorPrior(bias_scale=0.1, spread=0.05, spread_sd=1.0, least_spread=0.001, source="made up")
UNIFORM = st.floats(-0.5, 0.5)


def seen(*log_ratios: float) -> list[Observation]:
    return [Observation("x", 100.0, measured=100.0 * math.exp(z)) for z in log_ratios]


def noise(count: int, *, bias: float, spread: float, seed: int = 0) -> list[float]:
    """Log ratios from the model itself: Student's t with 4 degrees of freedom."""
    return list(bias + spread * np.random.default_rng(seed).standard_t(4, size=count))


def above(calibration: Calibration, limit: float) -> float:
    return float(calibration.probabilities_above(np.array([100.0]), limit)[0])


def fit(observations: list[Observation]) -> Calibration:
    return Calibration.fit(observations, PRIOR)


observations = st.lists(
    st.one_of(
        UNIFORM.map(lambda z: seen(z)[0]),
        UNIFORM.map(lambda z: Observation("x", 100.0, at_least=100 * math.exp(z))),
        UNIFORM.map(lambda z: Observation("x", 100.0, at_most=100 * math.exp(z))),
        st.tuples(UNIFORM, st.floats(0.01, 1.0)).map(
            lambda p: Observation(
                "x", 100.0, at_least=100 * math.exp(p[0]), at_most=100 * math.exp(p[0] + p[1])
            )
        ),
    ),
    max_size=5,
)


@pytest.mark.parametrize(("bias", "spread"), [(0.3, 0.02), (-0.15, 0.1), (0.0, 0.01)])
def test_a_known_bias_and_spread_are_recovered(bias, spread):
    factors = fit(seen(*noise(200, bias=bias, spread=spread))).factors
    assert math.log(factors.median) == pytest.approx(bias, abs=3 * spread / math.sqrt(200))
    # 90 % of Student's t with 4 degrees of freedom lie within 2.132 scales (any table of it).
    width = math.log(factors.high / factors.low) / 2
    assert width == pytest.approx(2.132 * spread, rel=0.25)


def test_without_data_there_is_the_prior():
    calibration = fit([])
    assert calibration.count == 0
    assert calibration.factors.median == pytest.approx(1.0)
    assert calibration.factors.low * calibration.factors.high == pytest.approx(1.0)
    # The exact predictive distribution, by drawing from the prior.
    draw = np.random.default_rng(1)
    bias = 0.1 * draw.standard_t(4, 400_000)
    spread = 0.05 * np.exp(draw.standard_normal(400_000))
    ratios = np.exp(bias + spread * draw.standard_t(4, 400_000))
    assert calibration.factors.high == pytest.approx(np.quantile(ratios, 0.95), rel=0.01)
    for limit in (80.0, 110.0, 150.0):
        assert above(calibration, limit) == pytest.approx(np.mean(ratios > limit / 100), abs=0.005)


def test_running_out_of_memory_raises_the_prediction():
    before, after = fit([]), fit([Observation("x", 100.0, at_least=110.0)])
    assert after.factors.median > before.factors.median
    assert above(after, 110.0) > above(before, 110.0)
    lower = fit([Observation("x", 100.0, at_most=90.0)])
    assert lower.factors.median < before.factors.median


def test_a_bound_that_was_to_be_expected_teaches_little():
    for bound in (Observation("x", 100.0, at_least=40.0), Observation("x", 100.0, at_most=300.0)):
        assert fit([bound]).factors.median == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize("outlier", [-3.0, 1.0, 4.0])
def test_an_outlier_hardly_moves_the_median(outlier):
    data = noise(12, bias=0.1, spread=0.02)
    clean, dirty = fit(seen(*data)).factors, fit(seen(*data, outlier)).factors
    assert abs(math.log(dirty.median / clean.median)) < 0.01
    assert abs(np.mean([*data, outlier]) - np.mean(data)) > 0.05  # which a mean would not survive


def test_trials_that_agree_overrule_the_prior():
    assert fit(seen(*noise(4, bias=1.5, spread=0.02))).factors.median == pytest.approx(
        math.exp(1.5), rel=0.05
    )


def test_intervals_do_not_become_narrower_than_the_least_spread():
    floor = ErrorPrior(0.1, 0.05, 1.0, 0.03, "made up")
    factors = Calibration.fit(seen(*[0.2] * 50), floor).factors
    assert math.log(factors.high / factors.low) / 2 > 2.13 * 0.03
    assert math.log(factors.high / factors.low) / 2 < 2.5 * 0.03


@pytest.mark.proof
def test_intervals_cover_as_often_as_they_say():
    """Truth drawn from the prior, a few trials, and then one more: inside 9 times out of 10."""
    draw = np.random.default_rng(3)
    inside = 0
    games = 300
    for _ in range(games):
        bias = 0.1 * draw.standard_t(4)
        spread = max(0.001, 0.05 * math.exp(draw.standard_normal()))
        ratios = bias + spread * draw.standard_t(4, size=draw.integers(1, 8))
        factors = fit(seen(*ratios[:-1])).factors
        inside += factors.low <= math.exp(ratios[-1]) <= factors.high
    error = math.sqrt(COVERAGE * (1 - COVERAGE) / games)
    assert abs(inside / games - COVERAGE) < 3 * error


@pytest.mark.proof
def test_intervals_cover_with_trials_that_ran_out_of_memory():
    """The limit hides what exceeds it; the interval of the next trial still holds."""
    draw = np.random.default_rng(4)
    inside = 0
    games = 300
    for _ in range(games):
        bias = 0.1 * draw.standard_t(4)
        spread = max(0.001, 0.05 * math.exp(draw.standard_normal()))
        ratios = bias + spread * draw.standard_t(4, size=5)
        trials = [
            seen(z)[0] if z <= 0.02 else Observation("x", 100.0, at_least=100 * math.exp(0.02))
            for z in ratios[:-1]
        ]
        factors = fit(trials).factors
        inside += factors.low <= math.exp(ratios[-1]) <= factors.high
    assert abs(inside / games - COVERAGE) < 3 * math.sqrt(COVERAGE * (1 - COVERAGE) / games)


@settings(max_examples=40)
@given(observations, st.floats(1e-3, 1e12), st.floats(1.0, 10.0))
def test_an_interval_contains_its_median_and_grows_with_the_prediction(data, predicted, more):
    calibration = fit(data)
    interval, larger = calibration.correct(predicted), calibration.correct(predicted * more)
    assert 0 < interval.low <= interval.median <= interval.high < math.inf
    assert larger.low >= interval.low
    assert larger.median >= interval.median
    assert larger.high >= interval.high


@settings(max_examples=40)
@given(observations, st.lists(st.floats(1.0, 1e4), min_size=2, max_size=6))
def test_probabilities_fall_with_the_limit_and_agree_with_the_interval(data, limits):
    calibration = fit(data)
    falling = [above(calibration, limit) for limit in sorted(limits)]
    assert all(0.0 <= p <= 1.0 for p in falling)
    assert falling == sorted(falling, reverse=True)
    interval = calibration.correct(100.0)
    assert above(calibration, interval.high) == pytest.approx(0.05, abs=1e-6)
    assert above(calibration, interval.low) == pytest.approx(0.95, abs=1e-6)
    many = calibration.probabilities_above(np.array([100.0, 200.0]), limits[0])
    assert many[0] == above(calibration, limits[0])
    assert many[1] >= many[0]


def test_evidence_prefers_the_prior_that_the_data_come_from():
    shuffle = random.Random(5)
    groups = [noise(10, bias=shuffle.gauss(0, 0.1), spread=0.05, seed=s) for s in range(8)]

    def evidence(prior: ErrorPrior) -> float:
        return sum(log_evidence(seen(*group), prior) for group in groups)

    wrong = [
        ErrorPrior(0.001, 0.05, 0.5, 0.0, ""),
        ErrorPrior(3.0, 0.05, 0.5, 0.0, ""),
        ErrorPrior(0.1, 0.002, 0.5, 0.0, ""),
        ErrorPrior(0.1, 1.0, 0.5, 0.0, ""),
    ]
    right = evidence(ErrorPrior(0.1, 0.05, 0.5, 0.0, ""))
    assert all(evidence(prior) < right for prior in wrong)
