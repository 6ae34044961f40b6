"""The Pareto front and its hypervolume, as properties over any set of trials."""

import csv
import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results_samples import GPU, SPACE, make_record, make_search, write_all

from tuner.core.errors import UnavailableError
from tuner.core.units import GIB
from tuner.report import report
from tuner.report.plot import layers
from tuner.report.report import report_html
from tuner.searches.front import (
    Direction,
    Objective,
    device_bytes,
    hypervolume,
    pareto_front,
    samples_per_s,
)
from tuner.searches.objectives import NAMES, coverage, objectives_of, require_known
from tuner.searches.store import ResultsFolder
from tuner.searches.view import build_view, levels
from tuner.space import TokenLengths
from tuner.space.searchspace import METRICS

LIMIT_GIB = GPU.memory_bytes / GIB
# Few distinct values, so that ties and duplicates happen often.
points = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 60)), max_size=25)


def trials(pairs):
    """Trials of so many samples/s and GiB; their tokens/s are in another order."""
    return [
        make_record(
            float(speed * tokens), gib * GIB, settings={"micro_batch": index}, sample_tokens=tokens
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


# -- fronts over other numbers than throughput and memory, and fronts per level of capacity ---


CAPACITY = dataclasses.replace(
    SPACE,
    capacity=("lora_rank", "max_length"),
    lengths=TokenLengths.from_points([(0, 0), (200, 0.5), (1000, 1)]),
)


def test_a_space_can_name_every_objective_and_both_know_its_direction():
    found = objectives_of(NAMES, SPACE, GPU)
    assert {o.name: str(o.direction) for o in found} == {m: o.direction for m, o in METRICS.items()}


def test_one_without_numbers_says_what_it_needs():
    free = dataclasses.replace(GPU, price_usd_per_hour=None)
    with pytest.raises(UnavailableError, match="it needs --price"):
        require_known([make_record()], objectives_of(["epoch_usd"], SPACE, free))


def test_cost_and_speed_have_the_same_order():
    view = build_view(make_search(60), SPACE, GPU, objectives=("epoch_usd", "samples_per_s"))
    assert len(view.front) == 1
    assert view.front == (build_view(make_search(60), SPACE, GPU).best.record,)


class TestCoverage:
    @pytest.mark.parametrize(
        ("length", "share"), [(0, 0.0), (100, 0.25), (200, 0.5), (600, 0.75), (1000, 1.0), (9e9, 1)]
    )
    def test_is_linear_between_known_lengths(self, length, share):
        assert coverage(CAPACITY, length) == pytest.approx(share)

    def test_front_keeps_what_truncates_less(self):
        records = [
            make_record(400, settings={"micro_batch": 1, "max_length": 200}),
            make_record(300, settings={"micro_batch": 1, "max_length": 1000}),
            make_record(250, settings={"micro_batch": 2, "max_length": 1000}),
        ]
        view = build_view(records, CAPACITY, GPU, objectives=("samples_per_s", "length_coverage"))
        assert [r.configuration["max_length"] for r in view.front] == [1000, 200]


def test_table_picture_and_report_are_of_the_objectives_of_the_space(tmp_path):
    space = dataclasses.replace(CAPACITY, objectives=("length_coverage", "epoch_usd"))
    folder = ResultsFolder(tmp_path, "qlora27b", "a6000")
    view = write_all(folder, make_search(80), space, GPU)
    rows = list(csv.DictReader(folder.pareto_csv.open()))
    assert [float(row["length_coverage"]) for row in rows] == sorted(
        float(row["length_coverage"]) for row in rows
    )
    assert folder.pareto_png.read_bytes().startswith(b"\x89PNG")
    page = folder.report_html.read_text()
    assert "Examples not truncated (share) against cost per epoch (USD)" in page
    assert "Fronts by level" in page
    drawn = {i for points in layers(view) for i in points.indices}
    assert drawn == set(range(80))


class TestLevels:
    def test_each_level_has_a_front_of_its_own(self):
        view = build_view(make_search(200), CAPACITY, GPU)
        found = levels(view)
        values = [tuple(level.values.values()) for level in found]
        assert values == sorted(set(values))
        assert sum(len(level.records) for level in found) == 200
        for level in found:
            alone = [
                r for r in view.records if level.values.items() <= r.configuration.to_dict().items()
            ]
            assert level.front() == build_view(alone, CAPACITY, GPU).front

    def test_a_report_shows_as_many_as_people_read(self, monkeypatch):
        view = build_view(make_search(200), CAPACITY, GPU)
        count = len(levels(view))
        assert f"{count} levels</summary>" in report_html(view)
        monkeypatch.setattr(report, "SHOWN_LEVELS", 2)
        assert f"{count} levels, the first 2 of them</summary>" in report_html(view)
