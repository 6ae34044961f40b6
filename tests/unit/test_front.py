"""The Pareto front and its hypervolume, as properties over any set of trials."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results_samples import GPU, make_record

from tuner.core.units import GIB
from tuner.searches.front import (
    Direction,
    Objective,
    device_bytes,
    hypervolume,
    pareto_front,
    samples_per_s,
)

LIMIT_GIB = GPU.memory_bytes / GIB
# Few distinct values, so that ties and duplicates happen often.
points = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 60)), max_size=25)


def trials(pairs):
    """Trials of so many samples/s and GiB; their tokens/s are in another order."""
    return [
        make_record(
            float(speed * tokens),
            gib * GIB,
            settings={"micro_batch": index},
            sample_tokens=tokens,
        )
        for index, (speed, gib) in enumerate(pairs)
        for tokens in [1 + (index * 389) % 1009]
    ]


def numbers(record):
    return samples_per_s(record), device_bytes(record)


def beats(a, b):
    (speed_a, size_a), (speed_b, size_b) = numbers(a), numbers(b)
    return speed_a >= speed_b and size_a <= size_b and (speed_a, size_a) != (speed_b, size_b)


@given(points)
def test_no_member_beats_another(pairs):
    front = pareto_front(trials(pairs))
    assert not any(beats(a, b) for a, b in itertools.permutations(front, 2))
    assert len({numbers(r) for r in front}) == len(front)


@given(points)
def test_what_is_left_out_is_beaten_or_equal_or_does_not_fit(pairs):
    records = trials(pairs)
    front = pareto_front(records)
    shown = {numbers(r) for r in front}
    for record in records:
        if record not in front and record.fits:
            assert numbers(record) in shown or any(beats(kept, record) for kept in front)
    assert all(record.fits for record in front)


@given(points)
def test_the_fastest_comes_first_and_memory_falls_along_the_front(pairs):
    front = [numbers(r) for r in pareto_front(trials(pairs))]
    assert front == sorted(front, reverse=True)
    assert [size for _, size in front] == sorted((size for _, size in front), reverse=True)


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=15))
def test_any_number_of_objectives(triples):
    objectives = [
        Objective(name, direction, name, lambda r, name=name: r.configuration[name])
        for name, direction in (
            ("a", Direction.MAXIMIZE),
            ("b", Direction.MINIMIZE),
            ("c", Direction.MAXIMIZE),
        )
    ]
    records = [make_record(settings=dict(zip("abc", t, strict=True))) for t in triples]
    turned = {(a, -b, c) for a, b, c in triples}
    undominated = {
        t
        for t in turned
        if not any(o != t and all(x >= y for x, y in zip(o, t, strict=True)) for o in turned)
    }
    front = pareto_front(records, objectives=objectives)
    assert {tuple(o.gain(r) for o in objectives) for r in front} == undominated


@given(points, st.integers(1, 46))
def test_hypervolume_equals_the_area_counted_cell_by_cell(pairs, limit_gib):
    records = trials(pairs)
    fitting = [(speed, gib) for speed, gib in pairs if gib < LIMIT_GIB - 1]
    cells = sum(
        any(speed >= row and gib <= column for speed, gib in fitting)
        for row in range(1, 9)
        for column in range(limit_gib)
    )
    assert hypervolume(records, reference=(0, limit_gib * GIB)) / GIB == pytest.approx(cells)
