"""How far a search had come after each trial."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results_samples import GPU, SPACE, make_record, make_search

from tuner.core.units import GIB
from tuner.report.progress_figure import progress, progress_figure, progress_text
from tuner.searches.front import hypervolume
from tuner.searches.view import build_view


def view_of(records):
    return build_view(records, SPACE, GPU)


@given(st.integers(2, 60), st.integers(0, 10**6))
def test_shares_rise_to_the_whole_and_are_those_of_the_first_trials(number, seed):
    records = make_search(number, seed=seed, measured=True)
    rows = progress(view_of(records))
    if not rows:
        assert not any(r.fits for r in records)
        return
    assert len(rows) == len(view_of(records).records)
    shares = [row.hypervolume for row in rows]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    assert rows[-1].throughput == 1
    half = len(rows) // 2
    reference = (0.0, float(GPU.memory_bytes))
    kept = view_of(records).records
    whole = hypervolume(kept, reference=reference)
    assert rows[half].hypervolume == pytest.approx(
        hypervolume(kept[: half + 1], reference=reference) / whole
    )


def test_predictions_are_no_trials():
    records = [make_record(100.0, settings={"micro_batch": 1}), make_record(300.0)]
    assert progress(view_of(records)) == []


def test_a_panel_for_trials_and_one_for_their_time():
    records = [
        make_record(100.0, settings={"micro_batch": 1}, measured=True),
        make_record(300.0, measured=True),
    ]
    untimed = [
        dataclasses.replace(r, outcome=dataclasses.replace(r.outcome, duration_s=0.0))
        for r in records
    ]
    figure = progress_figure(progress(view_of(untimed)))
    assert len(figure["data"]) == 3
    assert progress_text(progress(view_of(untimed))) == (
        "99 % of the hypervolume of all 2 trials was reached after 2, a configuration within 2 % "
        "of the fastest after 2; 0 ran out of memory"
    )
    measured = [
        dataclasses.replace(r, outcome=dataclasses.replace(r.outcome, duration_s=60.0))
        for r in records
    ]
    figure = progress_figure(progress(view_of(measured)))
    assert len(figure["data"]) == 6
    assert figure["data"][3]["x"] == [1.0, 2.0]  # minutes


def test_nothing_that_fits_is_no_progress():
    rows = progress(
        view_of([make_record(device_bytes=60 * GIB), make_record(10.0, device_bytes=61 * GIB)])
    )
    assert progress_figure(rows) is None
    assert progress_text(rows) == ""
