"""What predictions cannot order: marked on the front, and named for a measurement to decide."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace

import pytest
from results_samples import GPU, SPACE, make_record

from tuner.app.cli.answers import measure_command
from tuner.app.target import load_targets
from tuner.core.records import Configuration
from tuner.core.units import GIB
from tuner.report.plot import front_figure
from tuner.report.report import report_html
from tuner.report.terminal.front import print_front, print_recommendation
from tuner.searches.best import recommend
from tuner.searches.front import MOST_MEASURED, may_be_as_fast
from tuner.searches.view import build_view


def record(rate, gib, *, interval=None, **fields):
    """A configuration of `rate` tokens/s; measured where it has an interval, in tokens/s."""
    settings = {**SPACE.baseline, "micro_batch": fields.pop("micro_batch", round(gib))}
    made = make_record(rate, gib * GIB, settings=settings, measured=interval is not None, **fields)
    if interval is None:
        return made
    ends = (interval[0] / 600, interval[1] / 600)
    measurement = replace(made.outcome.measurement, samples_per_s_interval=ends)
    return replace(made, outcome=replace(made.outcome, measurement=measurement))


def test_predictions_closer_than_their_errors_differ_are_not_ordered():
    slow, near, far = record(300, 10), record(325, 11), record(335, 12)
    assert may_be_as_fast(slow, near)
    assert not may_be_as_fast(slow, far)
    # Measured rates are as certain as their intervals say, and not less.
    apart = record(300, 10, interval=(299, 301)), record(310, 11, interval=(309, 311))
    assert not may_be_as_fast(*apart)
    assert may_be_as_fast(apart[0], record(310, 12, interval=(300, 320)))


def test_the_larger_of_two_that_are_not_ordered_is_marked(capsys):
    front = [record(300, 10), record(320, 20), record(400, 30)]
    view = build_view(front, SPACE, GPU)
    assert [r.configuration["micro_batch"] for r in view.undecided] == [20]
    print_front(view)
    shown = capsys.readouterr().out
    assert [line.split()[:2] for line in shown.splitlines() if line.startswith("?")] == [
        ["?", "20.00"],
        ["?", "not"],
    ]
    (marked,) = (t for t in front_figure(view)["data"] if t.get("name", "").startswith("order"))
    assert marked["x"] == [20.0]
    assert "A white\n  centre" in report_html(view)
    certain = build_view([front[0], front[2]], SPACE, GPU)
    assert not certain.undecided
    assert "centre:" not in report_html(certain)


def test_a_measurement_decides_between_those_that_may_be_the_fastest(capsys):
    fastest, twin = record(400, 30), record(399, 31)  # the twin is not worth a trial
    near = [record(390 - 8 * n, 20 + n) for n in range(3)]
    slow = record(300, 10)
    best = recommend([slow, *near, twin, fastest], SPACE, GPU)
    assert [r.configuration for r in best.rivals] == [r.configuration for r in (twin, *near)]
    chosen = [c["micro_batch"] for c in best.to_measure]
    assert chosen == [30, 20, 21]
    assert len(chosen) == MOST_MEASURED
    data = best.to_dict()["undecided"]
    assert data["may_be_as_fast"] == 4
    assert [c["settings"]["micro_batch"] for c in data["measure"]] == chosen
    print_recommendation(best, measure="tuner search ...")
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 others are within prediction error; measure these 3: micro_batch=30; " in shown
    assert "measure tuner search ..." in shown
    # Where one was measured, or nothing is near, there is nothing to decide.
    assert not recommend([slow, fastest], SPACE, GPU).to_measure
    measured = [record(400, 30, interval=(380, 420)), record(395, 31, interval=(380, 420))]
    assert not recommend(measured, SPACE, GPU).rivals


@pytest.mark.parametrize("attention", [("sdpa", "sdpa"), ("sdpa", "eager")])
def test_the_command_searches_what_is_to_be_measured(attention):
    target = load_targets("qlora27b", ["a6000"])[0]
    settings = {**SPACE.baseline, "optimizer": "adamw_8bit", "max_length": 1024}
    records = [
        make_record(rate, gib * GIB, settings={**settings, "micro_batch": batch, "attention": kind})
        for rate, gib, batch, kind in ((400, 30, 2, attention[0]), (380, 20, 1, attention[1]))
    ]
    command = shlex.split(measure_command(target, recommend(records, SPACE, GPU)))
    assert command[:2] == ["tuner", "search"]
    pairs = list(itertools.pairwise(command))
    pinned = dict(word.split("=") for option, word in pairs if option == "--set")
    where = [word for option, word in pairs if option == "--where"]
    for record in records:
        assert target.space.matches(record.configuration, where)
        assert all(str(record.configuration[n]).lower() == v for n, v in pinned.items())
    other = Configuration({**records[0].configuration, "micro_batch": 4})
    assert not target.space.matches(other, where)
