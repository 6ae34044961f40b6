"""A deeper model's events aligned with a shallow one's: exact, with fewest insertions."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tuner.predict.compiler.repetition import align

tokens = st.integers(0, 5)
sequences = st.lists(tokens, max_size=40)
insertions = st.lists(st.tuples(st.integers(0, 40), st.lists(tokens, max_size=12)), max_size=4)


def aligned(ours: list[int], theirs: list[int]):
    return align(np.array(ours, dtype=np.int64), np.array(theirs, dtype=np.int64))


def with_insertions(ours: list[int], runs) -> list[int]:
    theirs = list(ours)
    for place, run in runs:
        theirs[min(place, len(theirs)) : min(place, len(theirs))] = run
    return theirs


def runs_inserted(places, length: int) -> int:
    """How many runs of the longer sequence stand between, before and after the places."""
    edges = [-1, *places, length]
    return sum(b - a > 1 for a, b in pairwise(edges))


def fewest_runs(ours: list[int], theirs: list[int]) -> int | None:
    """By trying everything, for short sequences."""
    best = {(0, 0): 0}  # (matched, at) -> runs, the next element of theirs being a match
    for matched in range(len(ours) + 1):
        for at in range(len(theirs) + 1):
            runs = best.get((matched, at))
            if runs is None or matched == len(ours):
                continue
            for place in range(at, len(theirs)):
                if theirs[place] == ours[matched]:
                    key = (matched + 1, place + 1)
                    best[key] = min(best.get(key, 99), runs + (place > at))
    ends = [
        runs + (at < len(theirs)) for (matched, at), runs in best.items() if matched == len(ours)
    ]
    return min(ends, default=None)


@given(ours=sequences, runs=insertions)
def test_inserted_runs_are_found(ours, runs):
    theirs = with_insertions(ours, runs)
    found = aligned(ours, theirs)
    assert found is not None
    assert [theirs[place] for place in found] == ours
    assert (np.diff(found) > 0).all()
    if ours:  # of nothing, all is insertion
        assert runs_inserted(found, len(theirs)) <= sum(bool(run) for _, run in runs)


@given(
    ours=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    theirs=st.lists(st.integers(0, 2), max_size=10),
)
def test_no_alignment_has_fewer_runs(ours, theirs):
    expected = fewest_runs(ours, theirs)
    found = aligned(ours, theirs)
    assert (found is None) == (expected is None)
    if found is not None:
        assert [theirs[place] for place in found] == ours
        assert runs_inserted(found, len(theirs)) == expected


@given(
    layer=st.lists(tokens, min_size=1, max_size=6),
    before=st.lists(st.integers(6, 9), max_size=4),
    after=st.lists(st.integers(6, 9), max_size=4),
)
def test_of_equal_layers_the_inserted_ones_are_the_last(layer, before, after):
    ours, theirs = [*before, *layer, *after], [*before, *layer * 3, *after]
    inside = slice(len(before), len(before) + len(layer))
    found = aligned(ours, theirs)[inside]
    assert found.tolist() == list(range(inside.start, inside.stop))


def test_what_is_no_subsequence_has_no_alignment():
    assert aligned([1, 2], [2, 1]) is None
    assert aligned([1, 2, 3], [1, 2]) is None
    assert aligned([1], []) is None
