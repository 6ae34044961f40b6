"""Results that come with tuner are found wherever it is called, as its spaces are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tuner.cli.main import run

ROOT = Path(__file__).parents[2]
BEST = ["best", "--space", "qlora27b", "--gpu", "a6000"]
FROM = "from the results that come with tuner"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_they_answer_where_nothing_was_searched(elsewhere, capsys):
    assert run(BEST) == 0
    out = capsys.readouterr().out
    assert FROM in out
    assert "Recommended (predicted)" in out
    assert run(["best", "--space", "qlora27b", "--gpu", "all"]) == 0
    assert list(elsewhere.iterdir()) == []


def test_ones_own_results_come_first(elsewhere, capsys):
    here = elsewhere / "results" / "qlora27b" / "a6000"
    here.mkdir(parents=True)
    lines = (ROOT / "results" / "qlora27b" / "a6000" / "trials.jsonl").read_text().splitlines()
    (here / "trials.jsonl").write_text("\n".join(lines[:1]) + "\n")
    assert run(BEST) == 0
    out = capsys.readouterr().out
    assert FROM not in out
    assert "best of 1 that fit" in out


@pytest.mark.parametrize("own", [("--results", "mine"), ()])
def test_another_folder_and_a_space_of_ones_own_have_none(elsewhere, capsys, own):
    """A space of the same name may be another one."""
    if not own:
        (elsewhere / "search_spaces").mkdir()
        shutil.copy(ROOT / "search_spaces" / "qlora27b.yaml", elsewhere / "search_spaces")
    assert run([*BEST, *own]) == 3
    assert "no results of 'qlora27b' on 'a6000'" in capsys.readouterr().err
