"""`tuner data`: the tables, the JSON, and one clear message for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuner.app.cli.main import run

SPACE = """\
workload: causal_lm
model: tiny
knobs:
  micro_batch: [1, 2]
  max_length: [25, 200]
fixed: {effective_batch: 2}
derived: {grad_accum: effective_batch // micro_batch}
"""
LENGTHS = [10, 20, 30, 100]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    write_space("silent", SPACE)
    stated = "data: {examples: 4, token_lengths: {mean: 40, max: 100}}\n"
    write_space("stated", SPACE + stated)
    Path("d.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in LENGTHS))
    return tmp_path


def write_space(name: str, text: str) -> None:
    Path(f"{name}.yaml").write_text(f"name: {name}\n{text}")


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(["data", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["data", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.usefixtures("folder")
class TestAnswers:
    FILE = ("--data", "d.jsonl", "--length-column", "n")

    def test_numbers_by_hand(self, capsys):
        found = as_json(capsys, "--space", "silent.yaml", *self.FILE)
        assert (found["examples"], found["tokens"], found["max_tokens"]) == (4, 160, 100)
        short, full = found["max_lengths"]
        assert (short["max_length"], full["max_length"]) == (25, 200)
        assert short["truncated_examples_share"]["value"] == pytest.approx(0.5)
        assert short["lost_tokens_share"]["value"] == pytest.approx(0.5)
        assert full["steps_per_epoch"] == {"longest": 2, "max_length": 2, "packing": 1}
        pair = full["padding"]["longest"][1]
        assert (pair["micro_batch"], pair["worst_length"]) == (2, 100)
        assert pair["expected_length"]["value"] == pytest.approx(920 / 16)

    def test_settings_narrow_the_tables(self, capsys):
        pinned = ("--set", "max_length=200", "--set", "micro_batch=2")
        found = as_json(capsys, "--space", "silent.yaml", *self.FILE, *pinned)
        (row,) = found["max_lengths"]
        assert [entry["micro_batch"] for entry in row["padding"]["longest"]] == [2]

    def test_tables_fit_a_terminal_of_80_columns(self, capsys):
        for space in (("silent.yaml", *self.FILE), ("stated.yaml",), ("qlora27b",)):
            assert run(["data", "--space", *space]) == 0
            out = capsys.readouterr().out
            assert max(map(len, out.splitlines())) <= 80
            assert "…" not in out

    def test_more_micro_batches_than_a_table_holds(self, capsys):
        wide = SPACE.replace("micro_batch: [1, 2]", "micro_batch: {min: 1, max: 9, step: 1}")
        wide = wide.replace("effective_batch: 2", "effective_batch: 2520")
        write_space("wide", wide)
        assert run(["data", "--space", "wide.yaml", *self.FILE]) == 0
        out = capsys.readouterr().out
        assert "batch 1 " in out
        assert "batch 9 " in out
        assert "3 more micro-batches" in out


@pytest.mark.usefixtures("folder")
class TestBadInput:
    def test_a_space_that_states_nothing(self, capsys):
        assert "has no token lengths" in error_of(capsys, "--space", "silent.yaml")

    def test_a_column_without_a_file(self, capsys):
        err = error_of(capsys, "--space", "stated.yaml", "--length-column", "n")
        assert "--data" in err
