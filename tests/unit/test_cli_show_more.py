"""`tuner show` and `best` over other objectives, and beside stale trials."""

import dataclasses
import json

import pytest
from cli_samples import make_trial, write_samples

from tuner.app.cli.main import run
from tuner.searches.journal import JournalWriter

TARGET = ["--space", "tiny.yaml", "--gpu", "a6000"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    old = make_trial(tmp_path, 12, 950, micro_batch=4, precision="bf16", max_length=16)
    old = dataclasses.replace(old, trial_id="older-1", versions={**old.versions, "torch": "1.0"})
    trials = [
        old,
        make_trial(tmp_path, 20, 100, micro_batch=1, max_length=16),
        make_trial(tmp_path, 25, 200, micro_batch=2, max_length=16),
        make_trial(tmp_path, 30, 90, micro_batch=1, max_length=32),
        make_trial(tmp_path, 99, 70, micro_batch=4, max_length=64),
    ]
    with JournalWriter(tmp_path / "results" / "tiny" / "a6000" / "trials.jsonl") as writer:
        for trial in trials:
            writer.append(trial)
    return tmp_path


def shown(capsys, *arguments: str) -> dict:
    assert run(["show", *TARGET, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


class TestStale:
    def test_is_left_out_and_said(self, folder, capsys):
        assert run(["show", *TARGET]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "1 trial of other versions (torch 1.0) left out" in text
        assert "950" not in text

    def test_can_be_shown_alone(self, folder, capsys):
        assert run(["show", *TARGET, "older-1"]) == 0
        assert "other versions than the newest trials" in capsys.readouterr().out


class TestObjectives:
    def test_front_is_over_those_that_were_asked_for(self, folder, capsys):
        answer = shown(capsys, "--objective", "length_coverage", "--objective", "device_bytes")
        assert answer["objectives"] == ["length_coverage", "device_bytes"]
        # The distribution of lengths is not known: all that is known is what truncates nothing.
        assert [r["configuration"]["max_length"] for r in answer["front"]] == [32]

    def test_first_one_decides_what_is_best(self, folder, capsys):
        assert run(["best", *TARGET, "--objective", "device_bytes"]) == 0
        out = capsys.readouterr().out
        assert "best in peak device memory" in out
        assert "micro_batch=1" in out

    def test_unknown_one_is_refused(self, folder, capsys):
        assert run(["best", *TARGET, "--objective", "speed"]) == 2
        assert "unknown objective 'speed'" in capsys.readouterr().err


def test_where_every_knob_differs_nothing_is_said_to_be_common(tmp_path, monkeypatch, capsys):
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    trials = [
        make_trial(tmp_path, 20, 100, micro_batch=1, max_length=16, lora_rank=4, precision="fp16"),
        make_trial(tmp_path, 25, 200, micro_batch=2, max_length=32, lora_rank=8, precision="bf16"),
    ]
    with JournalWriter(tmp_path / "results" / "tiny" / "a6000" / "trials.jsonl") as writer:
        for trial in trials:
            writer.append(trial)
    assert run(["show", *TARGET, "--where", "lora_rank >= 4"]) == 0
    printed = capsys.readouterr().out
    assert "bf16" in printed
    assert "all with" not in printed
    assert "optimizer=" not in printed  # no knob of this space
