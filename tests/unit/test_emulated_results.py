"""Emulated numbers are a kind of their own, between predicted and measured, wherever they go."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from results_samples import GPU, MARGIN_BYTES, SPACE, make_record

from tuner.core.records import Outcome, Source, Status, TrialRecord
from tuner.core.units import GIB
from tuner.report.plot import emulated_among_others, labels
from tuner.report.report import report_html
from tuner.report.table import pareto_csv
from tuner.report.terminal.evidence import print_ran
from tuner.report.terminal.front import print_front, print_recommendation
from tuner.searches.best import best_yaml, check_text, recommend
from tuner.searches.front import trusted
from tuner.searches.journal import encode, latest, read_journal
from tuner.searches.view import Kind, build_view

SMALL, LARGE = {"micro_batch": 1, "lora_rank": 128}, {"micro_batch": 8, "lora_rank": 128}


def emulated(tokens_per_s: float = 300.0, device_bytes: int = 30 * GIB, **fields) -> TrialRecord:
    return make_record(
        tokens_per_s, device_bytes, emulated=True, **{"margin_bytes": MARGIN_BYTES, **fields}
    )


def check_of(predicted: TrialRecord, device_bytes: int, **fields) -> TrialRecord:
    """A verification on an emulated device of what `predicted` is about."""
    settings = predicted.configuration.to_dict()
    return emulated(
        250.0, device_bytes, settings=settings, verification=True, trial_id="check-000", **fields
    )


class TestRecord:
    def test_it_says_what_it_is_and_comes_back_from_the_journal(self, tmp_path):
        record = emulated()
        assert record.source is Source.EMULATED
        assert record.outcome.evidence is record.outcome.emulation
        assert record.fits
        (tmp_path / "trials.jsonl").write_bytes(encode(record))
        (again,) = read_journal(tmp_path / "trials.jsonl").records
        assert again == record
        assert again.outcome.emulation.intervals["step_s"][0] > 0

    def test_numbers_in_the_field_of_another_kind_are_refused(self, tmp_path):
        record = emulated()
        with pytest.raises(ValueError, match="measurement holds numbers that are emulated"):
            Outcome(Status.OK, measurement=record.outcome.emulation)
        measured = make_record(measured=True)
        with pytest.raises(ValueError, match="emulation holds numbers that are measured"):
            Outcome(Status.OK, emulation=measured.outcome.measurement)
        data = record.to_dict()
        data["measured"] = data.pop("emulated")
        (tmp_path / "trials.jsonl").write_text(json.dumps(data) + "\n")
        with pytest.raises(Exception, match="not trial records"):
            read_journal(tmp_path / "trials.jsonl")

    @pytest.mark.parametrize(
        "path", sorted((Path(__file__).parents[2] / "results").glob("*/*/trials.jsonl")), ids=str
    )
    def test_committed_journals_read_as_before(self, path):
        for line in path.read_bytes().splitlines()[:20]:
            data = json.loads(line)
            record = TrialRecord.from_dict(data)
            assert record.source is not Source.EMULATED
            assert set(record.to_dict()) - set(data) <= {"exhausted", "stage"}


class TestKindsApart:
    def test_measured_beats_emulated_beats_predicted(self):
        predicted, ran = make_record(400.0), emulated(300.0)
        measured = make_record(200.0, measured=True, margin_bytes=MARGIN_BYTES)
        assert latest([ran, predicted]) == (ran,)
        assert latest([ran, measured, predicted]) == (measured,)

    def test_nothing_predicted_is_chosen_where_something_emulated_fits(self):
        predicted = make_record(900.0, settings=LARGE)
        ran = emulated(300.0, settings=SMALL)
        assert trusted([predicted, ran], GPU.memory_bytes) == [ran]
        view = build_view([predicted, ran], SPACE, GPU)
        assert view.source == "emulated"
        assert view.drawn_source == "predicted and emulated"
        assert view.kinds == (Kind.UNTRIED, Kind.BEST)
        assert labels(view)[Kind.UNTRIED] == "predicted to fit, not emulated"
        assert emulated_among_others(view) == [1]


class TestVerification:
    def test_a_prediction_that_passed_stays_what_it_is(self):
        predicted = make_record(400.0, 30 * GIB)
        (together,) = latest([predicted, check_of(predicted, 31 * GIB)])
        assert together.source is Source.PREDICTED
        assert together.outcome == predicted.outcome
        assert (together.verified, together.verified_source) == (True, Source.EMULATED)
        best = recommend([together], SPACE, GPU)
        assert best.source is Source.PREDICTED
        assert best.verified_text.startswith("emulated: 31.00 GiB, 16.40 GiB free")
        assert best.to_dict()["verified"] == "emulated"
        assert "verified: emulated" in best_yaml(best, SPACE, GPU, trials=1)
        assert "Verified: emulated: 31.00 GiB" in report_html(build_view([together], SPACE, GPU))
        assert check_text(together) == "emulated: 31.00 GiB (trial check-000)"

    def test_one_that_leaves_no_margin_takes_the_configuration_out(self):
        fast, slow = make_record(400.0, settings=LARGE), make_record(300.0, settings=SMALL)
        records = latest([fast, slow, check_of(fast, 47 * GIB, status=Status.OK)])
        assert [r.source for r in records] == [Source.PREDICTED] * 2
        assert [r.fits for r in records] == [False, True]
        assert recommend(records, SPACE, GPU).configuration == slow.configuration
        view = build_view(records, SPACE, GPU)
        assert view.kinds == (Kind.TOO_LARGE, Kind.BEST)

    @pytest.mark.parametrize("status", [Status.CRASHED, Status.TIMEOUT, Status.INTERRUPTED])
    def test_one_that_says_nothing_leaves_it_unverified(self, status):
        predicted = make_record(400.0)
        check = check_of(predicted, 31 * GIB)
        check = replace(check, outcome=Outcome(status, message="the emulator lacks a function"))
        (together,) = latest([predicted, check])
        assert (together.fits, together.verified) == (True, False)
        text = recommend([together], SPACE, GPU).verified_text
        if status is not Status.INTERRUPTED:
            assert text == (
                f"no: predicted only, and the emulated trial ended as {status}: "
                "the emulator lacks a function"
            )

    def test_of_an_emulated_search_it_counts_with_its_trials(self):
        first = emulated(300.0, 30 * GIB, trial_id="a-000")
        (together,) = latest([first, check_of(first, 32 * GIB)])
        assert (together.source, together.verified) == (Source.EMULATED, True)
        assert together.outcome.evidence.memory.device_bytes == 32 * GIB


def test_nothing_of_an_emulated_run_says_measured(capsys):
    records = [emulated(300.0, settings=SMALL), emulated(500.0, 40 * GIB, settings=LARGE)]
    view = build_view(records, SPACE, GPU)
    best = view.best
    print_front(view)
    print_recommendation(best)
    print_ran(records[0].outcome.emulation)
    printed = capsys.readouterr().out
    page = report_html(view)
    page = page[: page.index("<script")] + page[page.rindex("</script>") :]
    for text in (printed, pareto_csv(view), best_yaml(best, SPACE, GPU, trials=2), page):
        assert "emulated" in text
        assert "measured" not in text.lower()
    for record in records:
        data = record.to_dict()
        assert data.pop("measured") is None  # the key of every record
        assert "measured" not in json.dumps(data)
