"""`tuner search --dry-run`: what would run and what it costs, and that nothing else happens."""

from __future__ import annotations

import json

import pytest
from cli_samples import write_samples

from tuner.app.cli.main import run

SEARCH = ["search", "--space", "tiny.yaml", "--gpu", "a6000", "--mode", "predict", "--dry-run"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def planned(capsys, *arguments: str) -> dict:
    assert run([*SEARCH, "--json", "--quiet", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


class TestDryRun:
    def test_says_what_would_run_in_order_and_writes_nothing(self, folder, capsys):
        before = sorted(folder.rglob("*"))
        assert run([*SEARCH, "--trials", "5", "--price", "2"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        text = " ".join(out.split())
        for part in ("Dry run: no trial was run", ">99%", "5 trials, about", "of GPU time",
                     "USD at 2 USD per hour", "a search would run no trials"):  # fmt: skip
            assert part in text, part
        assert max(map(len, out.splitlines())) <= 80
        assert sorted(folder.rglob("*")) == before

    def test_wants_to_try_no_more_than_there_are(self, folder, capsys):
        assert run([*SEARCH, "--trials", "5000", "--where", "max_length < 64"]) == 0
        (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("predict ")]
        assert line.split()[1:2] == ["all"]
        assert "5000" not in line

    def test_begins_with_the_baseline_and_tries_nothing_twice(self, folder, capsys):
        answer = planned(capsys, "--trials", "12", "--price", "3600")
        found = [trial["configuration"] for trial in answer["trials"]]
        baseline = {"micro_batch": 1, "lora_rank": 8, "precision": "fp16", "max_length": 32}
        assert baseline.items() <= found[0].items()
        assert len({json.dumps(c, sort_keys=True) for c in found}) == 12
        assert all(0.9 < trial["fit_probability"] <= 1 for trial in answer["trials"])
        # A dollar a second: cost and time are the same number.
        total_s = sum(trial["gpu_s"] for trial in answer["trials"])
        assert answer["cost_usd"] == pytest.approx(answer["gpu_s"], abs=0.06)
        assert answer["gpu_s"] == pytest.approx(total_s, abs=1)
        assert total_s > 12 * 20  # each has 20 s of timed steps, and loads before

    def test_ends_where_the_money_would_end(self, folder, capsys):
        answer = planned(capsys, "--price", "3600", "--max-cost", "100")
        assert answer["stopped_by"] == "max_cost"
        assert 1 <= len(answer["trials"]) <= 5
        assert answer["cost_usd"] <= 100

    def test_says_which_trials_would_be_given_up(self, folder, capsys):
        assert run([*SEARCH, "--trials", "3", "--timeout", "20s"]) == 0
        assert "on a GPU, 3 of them would be stopped after 20.0 s" in " ".join(
            capsys.readouterr().out.split()
        )

    def test_names_knobs_that_change_nothing(self, folder, capsys):
        notes = planned(capsys, "--trials", "1")["notes"]
        # Where gradients are many beside the work of a step, the scaled loss of fp16 costs time.
        named = "precision changes neither memory nor time where micro_batch is 1 or 2 (predicted)"
        assert named in notes

    @pytest.mark.parametrize("searcher", ["tpe", "random", "grid"])
    def test_knows_every_searcher(self, folder, capsys, searcher):
        answer = planned(capsys, "--trials", "6", "--searcher", searcher)
        assert (len(answer["trials"]), answer["stopped_by"]) == (6, "budget")

    @pytest.mark.slow
    def test_what_was_predicted_is_still_to_be_tried(self, folder, capsys):
        short = ["--trials", "3", "--where", "max_length < 128"]
        before = planned(capsys, *short)
        assert run([*SEARCH[:-1], "--quiet", *short]) == 0
        capsys.readouterr()
        assert planned(capsys, *short)["trials"] == before["trials"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--min-gain", "1"], "'1' is not a share"),
        (["--min-gain", "1%", "--searcher", "tpe"], "does not estimate its gain"),
        (["--max-cost", "-1"], "'-1' is not a number above 0"),
        (["--gpu-hours", "nan"], "'nan' is not a number above 0"),
        (["--max-cost", "1", "--gpu", "rtx2080ti"], "price of the GPU, which is unknown"),
        (["--study", "nowhere/study.log"], "folder that does not exist"),
        (["--study", "tiny.yaml"], "not an Optuna study"),
        (["--study", "tiny-model"], "is a folder"),
    ],
)
def test_impossible_option_is_refused(folder, capsys, arguments, message):
    assert run([*SEARCH, *arguments]) == 2
    assert message in capsys.readouterr().err
