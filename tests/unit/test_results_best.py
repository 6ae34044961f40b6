"""The recommendation: the fastest that fits with its margin, and what follows from it."""

import csv
import dataclasses
import io
import itertools
import shlex
from dataclasses import replace

import pytest
import tune_fakes as fakes
import yaml
from device_fakes import measurement_of
from results_samples import GPU, MARGIN_BYTES, SPACE, make_record, make_search

from tuner.app.cli.answers import measure_command
from tuner.app.target import load_targets
from tuner.core.kinds import LOST
from tuner.core.records import Configuration, Outcome, Status
from tuner.core.units import GIB
from tuner.report.plot import front_figure
from tuner.report.report import report_html
from tuner.report.table import cell, pareto_csv
from tuner.report.terminal.front import print_front, print_recommendation
from tuner.searches.best import best_yaml, not_measured_text, recommend
from tuner.searches.cost import run_cost
from tuner.searches.facts import SpaceFacts
from tuner.searches.front import MOST_MEASURED, may_be_as_fast
from tuner.searches.view import Kind, build_view


def knobs(**changes):
    return {**SPACE.baseline, **changes}


def test_the_fastest_that_fits_is_recommended():
    slow = make_record(100, 20 * GIB, settings=knobs(micro_batch=1))
    fast = make_record(300, 40 * GIB, settings=knobs(micro_batch=4))
    too_large = make_record(900, 60 * GIB, settings=knobs(micro_batch=16))
    best = recommend([slow, too_large, fast], SPACE, GPU)
    assert best.record == fast
    assert (best.trials, best.fitting) == (3, 2)
    assert best.free_bytes == GPU.memory_bytes - 40 * GIB
    assert best.source == "predicted"


def test_longer_examples_are_no_way_to_be_faster():
    short = make_record(280, 30 * GIB, settings=knobs(max_length=1024), sample_tokens=1024)
    long = make_record(286, 40 * GIB, settings=knobs(max_length=1536), sample_tokens=1536)
    best = recommend([long, short], SPACE, GPU)
    assert best.record == short
    assert best.cost.epoch_s < run_cost(long, SPACE, GPU).epoch_s
    view = build_view([long, short], SPACE, GPU)
    assert view.front == (short,)
    # As its own baseline the longer one is slower by the samples/s.
    space = dataclasses.replace(SPACE, baseline=knobs(max_length=1536))
    gain = recommend([long, short], space, GPU).gain
    assert gain.speedup == pytest.approx(280 / 1024 / (286 / 1536))


def test_memory_inside_the_margin_is_not_recommended():
    tight = make_record(300, GPU.memory_bytes - MARGIN_BYTES // 2, status=Status.OK)
    assert recommend([tight], SPACE, GPU) is None


def test_of_equally_fast_ones_the_smaller_is_recommended():
    large = make_record(300, 40 * GIB, settings=knobs(micro_batch=4))
    small = make_record(300, 30 * GIB, settings=knobs(micro_batch=2))
    assert recommend([large, small], SPACE, GPU).record == small
    assert recommend([small, large], SPACE, GPU).record == small


def test_conditions_narrow_the_choice_but_not_the_baseline():
    baseline = make_record(100, 20 * GIB, settings=SPACE.baseline)
    short = make_record(400, 20 * GIB, settings=knobs(max_length=256))
    long = make_record(250, 30 * GIB, settings=knobs(micro_batch=8))
    best = recommend(
        [baseline, short, long],
        SPACE,
        GPU,
        where=lambda c: c["max_length"] >= 1024 and c["micro_batch"] > 1,
        conditions=["max_length >= 1024", "micro_batch > 1"],
    )
    assert best.record == long
    assert best.trials == 1
    assert best.gain.speedup == pytest.approx(2.5)
    assert best.gain.saved_bytes == -10 * GIB
    assert best.gain.baseline_fits


def test_a_smaller_limit_changes_the_answer():
    records = make_search(200)
    card = dataclasses.replace(GPU, memory_bytes=24 * GIB)
    full, small = recommend(records, SPACE, GPU), recommend(records, SPACE, card)
    assert small.evidence.memory.device_bytes + MARGIN_BYTES <= 24 * GIB
    assert full.evidence.speed.samples_per_s > small.evidence.speed.samples_per_s


def test_a_baseline_that_runs_out_of_memory_is_said():
    baseline = make_record(100, 80 * GIB, settings=SPACE.baseline)
    best = recommend([baseline, make_record(200, settings=knobs(micro_batch=2))], SPACE, GPU)
    assert not best.gain.baseline_fits
    assert best.to_dict()["baseline"]["status"] == "oom"


def test_time_and_money_of_a_run():
    # 600 tokens/s are 1 sample/s in these samples: an epoch of 118,431 examples in as many s.
    record = make_record(600.0, settings=knobs(effective_batch=32))
    cost = run_cost(record, SPACE, GPU)
    assert cost.epoch_s == pytest.approx(118_431)
    assert cost.run_s == pytest.approx(3 * 118_431)
    assert cost.epoch_usd == pytest.approx(118_431 / 3600 * 0.5)
    assert cost.run_usd == pytest.approx(3 * cost.epoch_usd)
    assert cost.steps_per_epoch == 3701


def test_best_yaml_reads_back_and_says_predicted_first():
    best = recommend(make_search(50), SPACE, GPU)
    text = best_yaml(best, SPACE, GPU, trials=50)
    comments = text.splitlines()[:2]
    assert all(line.startswith("# ") for line in comments)
    assert "PREDICTED" in comments[1]
    data = yaml.safe_load(text)
    assert data == best.to_dict()
    assert data["configuration"] == best.configuration.to_dict()
    memory = data["memory"]
    assert memory["peak_device_memory"] == f"{memory['peak_device_bytes'] / GIB:.2f} GiB"
    speed = best.evidence.speed
    for name in ("samples_per_s", "tokens_per_s"):
        assert data["speed"][name] == pytest.approx(getattr(speed, name), rel=1e-5)
    assert sum(memory["breakdown_bytes"].values()) == memory["peak_device_bytes"]


def test_best_yaml_says_when_nothing_fits():
    text = best_yaml(None, SPACE, GPU, trials=12)
    assert "None of the 12 configurations" in text
    assert yaml.safe_load(text)["configuration"] is None


def test_each_trial_is_drawn_as_what_it_is():
    records = [
        make_record(300, 40 * GIB, settings=knobs(micro_batch=4)),
        make_record(100, 20 * GIB, settings=knobs(micro_batch=1)),
        make_record(90, 30 * GIB, settings=knobs(micro_batch=2)),
        make_record(999, 20 * GIB, settings=knobs(lora_rank=8)),
        make_record(999, 60 * GIB, settings=knobs(micro_batch=16)),
        make_record(300, 40 * GIB, settings=knobs(micro_batch=32), status=Status.CRASHED),
    ]
    view = build_view(records, SPACE, GPU, where=lambda c: c["lora_rank"] >= 128)
    expected = [Kind.BEST, Kind.FRONT, Kind.FITS, Kind.OUTSIDE, Kind.TOO_LARGE, Kind.FAILED]
    assert list(view.kinds) == expected
    assert view.front == (records[1], records[0])  # from the least memory to the most


def test_other_spaces_and_gpus_are_left_out():
    other = dataclasses.replace(make_record(900), space="other")
    assert build_view([other, make_record(1)], SPACE, GPU).records == (make_record(1),)
    assert build_view([make_record(1, gpu=dataclasses.replace(GPU, id="t4"))], SPACE, GPU).best is (
        None
    )


def test_the_table_holds_the_front():
    import csv
    import io

    view = build_view(make_search(300), SPACE, GPU)
    rows = list(csv.DictReader(io.StringIO(pareto_csv(view))))
    assert [int(row["device_bytes"]) for row in rows] == [
        r.outcome.evidence.memory.device_bytes for r in view.front
    ]
    assert [row["recommended"] for row in rows] == ["false"] * (len(rows) - 1) + ["true"]
    assert {row["source"] for row in rows} == {"predicted"}
    assert rows[-1]["trial_id"] == view.best.record.trial_id
    for name in ("samples_per_s", "tokens_per_s"):
        speeds = [getattr(r.outcome.evidence.speed, name) for r in view.front]
        assert [float(row[name]) for row in rows] == pytest.approx(speeds, rel=1e-5)
    assert rows[-1]["lora_targets"] == "q_proj+v_proj"


@pytest.mark.parametrize(
    "text", ["=1+2", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "'=1", "plain", ""]
)
def test_a_text_is_no_formula_of_a_spreadsheet_and_comes_back(text):
    record = make_record(settings=knobs(micro_batch=-4), trial_id=text)
    (row,) = csv.DictReader(io.StringIO(pareto_csv(build_view([record], SPACE, GPU)), newline=""))
    assert not row["trial_id"].startswith(("=", "+", "-", "@", "\t", "\r"))
    assert row["trial_id"].removeprefix("'") == text.replace("\r", " ")
    assert row["micro_batch"] == "-4"
    assert cell(("-q", "v")) == "'-q+v"


# -- what predictions cannot order ------------------------------------------------------------


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


# -- a faster configuration whose trial was killed -------------------------------------------

FITTING = [c for c in fakes.FakeSpace().configurations() if fakes.outcome_of(c).prediction.fits]
SLOWEST, *_, FASTEST = sorted(
    FITTING, key=lambda c: fakes.outcome_of(c).prediction.speed.samples_per_s
)


def killed(status: Status, message: str):
    prediction = fakes.outcome_of(FASTEST).prediction
    record = fakes.record_of(FASTEST, Outcome(status, prediction=prediction, message=message))
    return dataclasses.replace(record, device="Testium 9")


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        (Status.INTERRUPTED, f"{LOST}: the process was ended by SIGKILL", True),
        (Status.CRASHED, f"{LOST}: its node has died: w1", True),
        (Status.CRASHED, "RuntimeError: no kernel image", False),
        (Status.OOM, "CUDA out of memory", False),
    ],
)
def test_the_predicted_best_that_was_lost_is_named(status, message, said):
    ran = measurement_of(fakes.outcome_of(SLOWEST).prediction, device="Testium 9", factor=1)
    measured = fakes.record_of(SLOWEST, Outcome(Status.OK, measurement=ran))
    space = SpaceFacts("fake", knobs=tuple(fakes.FakeSpace().knobs))
    best = recommend([measured, killed(status, message)], space, fakes.GPU)
    assert best.configuration == SLOWEST
    text = not_measured_text(best)
    assert (message in text) is said
    assert best.to_dict()["undecided"].get("not_measured", "") == text
