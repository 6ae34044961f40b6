"""Measured and simulated trials of one folder: which counts, and how well they agree."""

import dataclasses
import itertools
import json

import pytest
from device_fakes import measured
from results_samples import GPU, SPACE, make_record

from tuner.core.records import Exhausted, Outcome, Source, Status, TrialRecord
from tuner.core.units import GIB
from tuner.report.terminal.front import pairs, prediction_error_rows, verdicts_text
from tuner.searches.best import recommend
from tuner.searches.journal import latest
from tuner.searches.view import Kind, build_view

NAME = "NVIDIA RTX A6000"


def record(batch: int, tokens_per_s: float, gib: float = 30.0, **fields) -> TrialRecord:
    settings = {"micro_batch": batch, "lora_rank": 128}
    return make_record(tokens_per_s, round(gib * GIB), settings=settings, **fields)


def ran_out(of: TrialRecord) -> TrialRecord:
    """The trial as it is left when memory ran out on the device."""
    outcome = Outcome(Status.OOM, prediction=of.outcome.prediction, phase="backward")
    return dataclasses.replace(of, outcome=outcome, device=NAME)


class TestRecord:
    def test_survives_the_journal(self):
        one = measured(
            record(1, 300), device=NAME, memory_limit_bytes=40 * GIB, margin_bytes=2 * GIB
        )
        again = TrialRecord.from_dict(json.loads(json.dumps(one.to_dict())))
        assert again == one
        assert (again.source, again.device) == (Source.MEASURED, NAME)

    def test_of_an_old_journal_loads(self):
        data = record(1, 300).to_dict()
        for name in ("device", "memory_limit_bytes", "margin_bytes"):
            del data[name]
        assert TrialRecord.from_dict(data) == record(1, 300)


class TestChoice:
    def test_measured_out_of_memory_beats_a_prediction_that_fits_whichever_came_first(self):
        predicted = record(1, 300)
        for order in ([predicted, ran_out(predicted)], [ran_out(predicted), predicted]):
            (kept,) = latest(order)
            assert kept.outcome.status is Status.OOM
            assert recommend(latest(order), SPACE, GPU) is None

    def test_front_and_best_are_measured_where_something_measured_fits(self):
        slow = measured(record(1, 300), device=NAME)
        fast = record(4, 900)
        view = build_view([slow, fast], SPACE, GPU)
        assert (view.best.record, view.front, view.source) == (slow, (slow,), "measured")
        assert view.drawn_source == "predicted and measured"
        assert view.kinds == (Kind.BEST, Kind.UNTRIED)
        assert (view.best.trials, view.best.fitting) == (1, 1)

    def test_gain_compares_measured_with_measured_only(self):
        baseline = make_record(200, 20 * GIB, settings=dict(SPACE.baseline or {}))
        fast = measured(record(4, 900), device=NAME)
        for first, has_gain in ((baseline, False), (measured(baseline, device=NAME), True)):
            best = recommend([first, fast], SPACE, GPU)
            assert (best.gain is not None) is has_gain


class TestAgreement:
    def test_ratios_are_predicted_over_measured(self):
        found = pairs([measured(record(b, 300), device=NAME, factor=1.25) for b in (1, 2)])
        for row in prediction_error_rows(found):
            assert (row["median"], row["mean error"]) == ("0.800", "20.0%")
            assert row["in 90 % interval"] == "?"

    def test_intervals_are_checked_against_the_measured_value(self):
        one = record(1, 300)
        prediction = one.outcome.prediction
        step_s = prediction.speed.step_s
        intervals = {"step_s": (0.9 * step_s, 1.1 * step_s)}
        prediction = dataclasses.replace(prediction, intervals=intervals)
        outcome = dataclasses.replace(one.outcome, prediction=prediction)
        one = dataclasses.replace(one, outcome=outcome)
        for factor, covered in ((1.05, "100%"), (1.2, "0%")):
            rows = prediction_error_rows(pairs([measured(one, device=NAME, factor=factor)]))
            assert [row["in 90 % interval"] for row in rows] == ["?", "?", covered]

    def test_verdicts_count_what_was_wrong(self):
        fine, tight = record(1, 300), record(2, 300, gib=60)
        records = [
            measured(fine, device=NAME),
            ran_out(record(3, 300)),
            measured(tight, device=NAME, factor=0.5),
            ran_out(record(4, 300, gib=60)),
            record(5, 300),  # nobody tried it
        ]
        text = verdicts_text(records)
        assert "2 of 4 trials; 1 did not fit, contrary to the prediction; 1 fitted" in text


# -- trials of one configuration that was measured more than once -----------------------------


def trial(name: str, tokens_per_s: float, gib: float = 30, **fields):
    return make_record(tokens_per_s, round(gib * GIB), measured=True, trial_id=name, **fields)


def numbers(record):
    measurement = record.outcome.measurement
    return measurement.speed.tokens_per_s, measurement.memory.device_bytes / GIB


def test_speed_of_all_and_the_largest_memory_stand_for_all():
    trials = [trial("a", 300, 30), trial("b", 330, 31), trial("c", 310, 30)]
    (one,) = latest(trials)
    speed, gib = numbers(one)
    assert 300 < speed < 330
    assert gib == 31
    for order in itertools.permutations(trials):
        assert numbers(latest(order)[0]) == pytest.approx((speed, gib))


def test_out_of_memory_at_last_is_out_of_memory():
    oom = trial("b", 300, status=Status.OOM, device=GPU.name)
    outcome = dataclasses.replace(oom.outcome, measurement=None, exhausted=Exhausted.DEVICE)
    oom = dataclasses.replace(oom, outcome=outcome)
    view = build_view([trial("a", 300, device=GPU.name), oom], SPACE, GPU)
    assert (len(view.records), view.front, view.best) == (1, (), None)


def test_a_line_written_again_is_no_other_trial():
    (one,) = latest([trial("a", 300), trial("a", 320)])
    assert numbers(one)[0] == 320


def test_other_versions_are_not_mixed_in():
    old = trial("a", 100, versions={"torch": "2.12.0"})
    (one,) = latest([old, trial("b", 300), trial("c", 302)])
    assert 300 < numbers(one)[0] < 302
