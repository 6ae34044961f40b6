"""Truncation, padding and batches from a distribution of token lengths."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.core.errors import InputError
from tuner.space.lengths import PADDING_MODES, TokenLengths, _Bounds

lengths_st = st.lists(st.integers(0, 300), min_size=1, max_size=40).filter(any)
max_length_st = st.integers(1, 350)
micro_batch_st = st.integers(1, 64)


def exactly(bounds: _Bounds) -> float:
    assert bounds.value is not None
    return bounds.value


# --- counted lengths, by hand ----------------------------------------------------------------

FOUR = TokenLengths.from_lengths([10, 20, 30, 100])


def test_summary_of_counted_lengths():
    assert (FOUR.mean, FOUR.max, FOUR.examples, FOUR.tokens, FOUR.known) == (40, 100, 4, 160, True)


def test_one_example_a_batch_is_never_padded():
    shape = FOUR.batch(1, 64)
    assert exactly(shape.padding_share) == 0
    assert shape.expected_length == shape.tokens_per_sample == _Bounds.exactly(124 / 4)
    assert shape.worst_length == 64


def test_padding_to_max_length_by_hand():
    shape = FOUR.batch(8, 200, "max_length")
    assert (shape.expected_length, shape.worst_length) == (_Bounds.exactly(200), 200)
    assert exactly(shape.padding_share) == pytest.approx(1 - 40 / 200)


def test_packing_by_hand():
    shape = FOUR.batch(8, 80, "packing")
    assert (exactly(shape.padding_share), shape.worst_length) == (0, 80)
    assert exactly(shape.tokens_per_sample) == 40  # nothing is cut
    assert exactly(shape.samples_per_sequence) == 2


def test_steps_per_epoch_by_hand():
    ten = TokenLengths.from_lengths([50] * 10)
    assert ten.steps_per_epoch(4, 512) == 3  # 4, 4 and 2 examples
    assert ten.steps_per_epoch(4, 64, "packing") == 2  # 500 tokens are 8 rows of 64
    assert TokenLengths.from_summary(mean=5, longest=9).steps_per_epoch(4, 512) is None


def test_packed_rows_are_counted_without_rounding_errors():
    # 3 * (10 / 3) is not 10 for every quotient that a mean can be.
    thirds = TokenLengths.from_lengths([3, 3, 4] * 49)
    assert thirds.steps_per_epoch(1, 490, "packing") == 1


# --- quantiles and histograms ----------------------------------------------------------------


def test_uniform_lengths_have_the_closed_form_of_the_beta_distribution():
    # The maximum of m uniform draws on [0, 100] has mean 100 m / (m + 1).
    uniform = TokenLengths.from_points([(0, 0), (100, 1)])
    assert uniform.mean == pytest.approx(50)
    for m in (1, 2, 7, 1000):
        expected = exactly(uniform.batch(m, 100).expected_length)
        assert expected == pytest.approx(100 * m / (m + 1), rel=1e-12)
    # Cut at half: E[min(X, 50)] = 25 + 12.5.
    assert exactly(uniform.batch(1, 50).tokens_per_sample) == pytest.approx(37.5)
    assert exactly(uniform.truncation(50).share_examples) == pytest.approx(0.5)


# --- properties of every known distribution --------------------------------------------------


@given(lengths_st, max_length_st)
def test_truncation_is_what_cutting_does(lengths, max_length):
    cut = TokenLengths.from_lengths(lengths).truncation(max_length)
    longer = sum(length > max_length for length in lengths) / len(lengths)
    lost = 1 - sum(min(length, max_length) for length in lengths) / sum(lengths)
    assert exactly(cut.share_examples) == pytest.approx(longer, abs=1e-9)
    assert exactly(cut.share_tokens) == pytest.approx(lost, abs=1e-9)


@given(lengths_st, max_length_st, st.integers(1, 200))
def test_expected_length_is_the_sum_over_counted_lengths(lengths, max_length, micro_batch):
    """The textbook sum for discrete draws: length times the probability that it is longest."""
    cut = sorted(min(length, max_length) for length in lengths)
    n = len(cut)
    expected = math.fsum(
        cut[i] * (((i + 1) / n) ** micro_batch - (i / n) ** micro_batch) for i in range(n)
    )
    known = TokenLengths.from_lengths(lengths)
    assert exactly(known.batch(micro_batch, max_length).expected_length) == pytest.approx(expected)


# --- mean and maximum alone ------------------------------------------------------------------


def test_an_unknown_distribution_gives_intervals_and_no_default():
    unknown = TokenLengths.from_summary(mean=235, longest=933)
    shape = unknown.batch(4, 512)
    assert shape.expected_length.value is None
    assert shape.padding_share.value is None
    assert shape.worst_length == 512
    assert unknown.truncation(512).share_examples == _Bounds(0, 235 / 513)  # Markov
    assert unknown.truncation(1024).share_tokens == _Bounds.exactly(0)


def test_what_the_mean_alone_decides_is_exact():
    unknown = TokenLengths(mean=200, max=900, examples=100)
    assert exactly(unknown.batch(4, 1000, "max_length").padding_share) == pytest.approx(0.8)
    assert exactly(unknown.batch(4, 1000, "packing").samples_per_sequence) == 5
    assert unknown.steps_per_epoch(4, 1000, "packing") == 5
    assert unknown.batch(1, 1000).expected_length == _Bounds.exactly(200)


def test_lengths_all_alike_leave_no_doubt():
    alike = TokenLengths.from_summary(mean=100, longest=100)
    assert alike.truncation(50).share_examples == _Bounds.exactly(1)
    assert alike.truncation(50).share_tokens == _Bounds.exactly(0.5)
    assert exactly(alike.batch(8, 50).expected_length) == 50


@given(lengths_st, max_length_st, micro_batch_st, st.sampled_from(PADDING_MODES))
def test_bounds_hold_for_every_distribution(lengths, max_length, micro_batch, mode):
    known = TokenLengths.from_lengths(lengths)
    unknown = TokenLengths.from_summary(mean=known.mean, longest=known.max)
    pairs = []
    for name in ("share_examples", "share_tokens"):
        cuts = (d.truncation(max_length) for d in (known, unknown))
        pairs.append(tuple(getattr(cut, name) for cut in cuts))
    shapes = [d.batch(micro_batch, max_length, mode) for d in (known, unknown)]
    for name in ("expected_length", "padding_share", "tokens_per_sample", "samples_per_sequence"):
        pairs.append(tuple(getattr(shape, name) for shape in shapes))
    for exact, bounds in pairs:
        assert bounds.low <= bounds.high
        slack = 1e-9 * max(1, abs(bounds.high))
        assert bounds.low - slack <= exactly(exact) <= bounds.high + slack
    assert shapes[0].worst_length == shapes[1].worst_length


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([], "no token lengths"), ([5, -1], "-1 is negative"), ([0, 0], "no example has a token")],
)
def test_lengths_that_are_none(lengths, message):
    with pytest.raises(InputError, match=message):
        TokenLengths.from_lengths(lengths)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "end at fraction 1"),
        ([(0, 0), (10, 0.9)], "end at fraction 1"),
        ([(0, 0), (10, 0.9), (5, 1)], "rise together"),
        ([(0, 0.5), (10, 0.2), (20, 1)], "rise together"),
        ([(-5, 0), (10, 1)], "negative"),
        ([(0, 0), (math.nan, 1)], "finite"),
        ([(0, 1)], "no example has a token"),
    ],
)
def test_points_that_are_no_distribution(points, message):
    with pytest.raises(InputError, match=message):
        TokenLengths.from_points(points)


@pytest.mark.parametrize(("mean", "longest"), [(0, 10), (11, 10), (math.nan, 10)])
def test_summaries_that_contradict_themselves(mean, longest):
    with pytest.raises(InputError, match="mean"):
        TokenLengths.from_summary(mean=mean, longest=longest)


def test_sizes_and_modes_that_are_none():
    with pytest.raises(InputError, match=r"unknown padding 'longst'[\s\S]*'longest'"):
        FOUR.batch(1, 8, "longst")
    with pytest.raises(InputError, match="unknown padding"):
        FOUR.steps_per_epoch(1, 8, "longst")
    for call in (
        lambda: FOUR.batch(0, 8),
        lambda: FOUR.truncation(0),
        lambda: FOUR.steps_per_epoch(0, 8),
    ):
        with pytest.raises(ValueError, match="below 1"):
            call()
