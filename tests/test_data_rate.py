"""Non-padding tokens per second where each batch has its own length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.data import LengthDistribution, token_rate

FOUR = LengthDistribution.from_lengths([10, 20, 30, 100])
lengths_st = st.lists(st.integers(0, 300), min_size=1, max_size=20).filter(any)


def test_time_linear_in_length_needs_the_expected_length_alone():
    rate = token_rate(
        FOUR, lambda n: 0.5 + 0.01 * n, micro_batch=2, max_length=200, grad_accum=4, nodes=3
    )
    mean_s = 0.5 + 0.01 * 920 / 16
    assert rate.step_s.value == pytest.approx(mean_s)
    assert rate.samples_per_s.value == pytest.approx(8 / mean_s)
    assert rate.tokens_per_s.value == pytest.approx(8 * 40 / mean_s)


def test_quadratic_time_is_met_at_the_lengths_that_occur():
    # Batches of one are 10, 20, 30 or 100 long, each as often, and every one is a node.
    rate = token_rate(FOUR, lambda n: n * n, micro_batch=1, max_length=200, nodes=4)
    assert set(rate.lengths) == {10, 20, 30, 100}
    assert rate.step_s.value == pytest.approx((100 + 400 + 900 + 10_000) / 4)


def test_more_nodes_come_closer_to_a_convex_time_from_above():
    uniform = LengthDistribution.from_points([(0, 0), (1000, 1)])
    exact = 1000**2 / 2  # E[max^2] of two uniform draws is a half
    errors = [
        token_rate(uniform, lambda n: n * n, micro_batch=2, max_length=1000, nodes=n).step_s.low
        / exact
        - 1
        for n in (2, 8, 32)
    ]
    assert errors[0] > errors[1] > errors[2] > 0
    assert errors[2] < 0.002


@pytest.mark.parametrize("mode", ["max_length", "packing"])
def test_rows_of_one_length_ask_for_one_time(mode: str):
    asked = []

    def step_s(length: int) -> float:
        asked.append(length)
        return 2.0

    rate = token_rate(FOUR, step_s, micro_batch=3, max_length=80, padding=mode, grad_accum=2)
    assert asked == [80]
    kept = 6 * 35 if mode == "max_length" else 6 * 80  # 10, 20, 30 and 80 of 100; full rows
    assert rate.tokens_per_s.value == pytest.approx(kept / 2)
    assert rate.samples_per_s.value == pytest.approx(6 / 2 * (1 if mode == "max_length" else 2))


@given(lengths_st, st.integers(1, 350), st.integers(1, 16), st.integers(1, 20))
def test_bounds_hold_for_every_distribution(
    lengths: list[int], max_length: int, micro_batch: int, nodes: int
):
    def step_s(length: int) -> float:
        return 1 + 0.01 * length

    known = LengthDistribution.from_lengths(lengths)
    unknown = LengthDistribution.from_summary(mean=known.mean, longest=known.max)
    exact, bounds = (
        token_rate(d, step_s, micro_batch=micro_batch, max_length=max_length, nodes=nodes)
        for d in (known, unknown)
    )
    assert all(1 <= n <= max(1, min(max_length, known.max)) for n in exact.lengths + bounds.lengths)
    for name in ("tokens_per_s", "samples_per_s", "step_s"):
        number, interval = getattr(exact, name).value, getattr(bounds, name)
        assert interval.low * (1 - 1e-9) <= number <= interval.high * (1 + 1e-9)


def test_tokens_per_second_never_exceed_full_batches():
    full = token_rate(FOUR, lambda n: 0.1 * n, micro_batch=4, max_length=64)
    assert full.tokens_per_s.high <= 4 * 64 / 6.4 + 1e-9
