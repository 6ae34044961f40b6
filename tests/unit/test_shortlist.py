"""Which configurations of a predicted space are tried: properties of the short list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from results_samples import make_prediction

from tuner.core.records import Configuration, MemoryBudget, Prediction
from tuner.predict.candidates import NEAR_LIMIT, shortlist

LIMIT, MARGIN = 1000, 30

pairs = st.tuples(st.integers(1, 20), st.integers(500, 1200))
spaces = st.lists(pairs, max_size=40)


def predicted(speed: float, device_bytes: int) -> Prediction:
    budget = MemoryBudget(LIMIT, MARGIN)
    return make_prediction(device_bytes, 512.0 * speed, sample_tokens=512, budget=budget)


def space(rows: list[tuple[int, int]]) -> tuple[list[Configuration], list[Prediction]]:
    return [Configuration({"n": n}) for n in range(len(rows))], [predicted(*row) for row in rows]


def chosen(rows: list[tuple[int, int]], number: int) -> list[int]:
    configurations, predictions = space(rows)
    return [int(str(c["n"])) for c in shortlist(configurations, predictions, number)]


def fits(row: tuple[int, int]) -> bool:
    return row[1] + MARGIN <= LIMIT


@given(rows=spaces, number=st.integers(1, 50))
def test_the_fastest_that_fits_comes_first(rows, number):
    fitting = [row for row in rows if fits(row)]
    found = chosen(rows, number)
    if fitting:
        # Of equally fast ones the smallest.
        assert rows[found[0]] == min(fitting, key=lambda row: (-row[0], row[1]))


@given(rows=spaces)
def test_what_is_far_too_large_is_never_tried(rows):
    usable = LIMIT - MARGIN
    for index in chosen(rows, 100):
        assert rows[index][1] <= usable * (1 + NEAR_LIMIT)


@given(rows=spaces)
def test_a_long_list_has_the_whole_front_and_every_distinct_fit(rows):
    """Configurations with equal numbers count once; what fits is all there otherwise."""
    found = [rows[index] for index in chosen(rows, 1000)]
    fitting = {row for row in rows if fits(row)}
    assert {row for row in found if fits(row)} == fitting
    assert sum(fits(row) for row in found) == len(fitting)


@given(rows=spaces)
def test_a_long_list_has_everything_just_above_the_limit(rows):
    near = {i for i, row in enumerate(rows) if not fits(row) and row[1] <= (LIMIT - MARGIN) * 1.05}
    assert near <= set(chosen(rows, 1000))


@given(rows=st.lists(pairs, min_size=12, max_size=40, unique=True))
def test_a_short_list_has_some_of_each(rows):
    """Fast ones, small ones of the front, and a fifth or so that may yet fit."""
    found = [rows[index] for index in chosen(rows, 9)]
    fitting = [row for row in rows if fits(row)]
    near = [row for row in rows if not fits(row) and row[1] <= (LIMIT - MARGIN) * (1 + NEAR_LIMIT)]
    if len(fitting) >= 9 and near:
        assert sum(not fits(row) for row in found) in (1, 2, 3)
    if len(fitting) >= 2:
        front = [
            row
            for row in fitting
            if not any(o[0] >= row[0] and o[1] <= row[1] and o != row for o in fitting)
        ]
        taken = [row for row in found if row in front]
        assert len(taken) >= min(len(front), 3)
