"""Results that come with tuner are found wherever it is called, as its spaces are."""

import json
import runpy
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from tuner.app.cli.main import run
from tuner.app.estimate import estimate_configuration, one_configuration
from tuner.space import load_space
from tuner.space.gpus import get_gpu

ROOT = Path(__file__).parents[2]
CARDS = runpy.run_path(str(ROOT / "benchmarks" / "emulated_runs" / "cards.py"))
"""The script that makes the tables of the pages."""
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
    smallest = min(lines, key=lambda line: json.loads(line)["predicted"]["memory"]["device_bytes"])
    (here / "trials.jsonl").write_text(smallest + "\n")
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


# -- numbers that pages repeat ----------------------------------------------------------------


def words(page: str) -> str:
    """The text of a page in one line."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", ["README.md", "docs/accuracy.md"])
def test_a_page_says_of_published_runs_what_the_evidence_says(page):
    evidence = (ROOT / "docs/notebook/accuracy.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in evidence.splitlines()]
    found = {(row[0], row[1]): row for row in rows if len(row) == 7}
    text = words(page)
    for said, rows_of in (
        ("**device memory** (decides `fits`)", ("device memory", "T4, A100")),
        ("peak allocated memory", ("peak allocated", "T4, RTX 4080, A100, grade A")),
        ("step time", ("step time", "T4, RTX 4080, A100, grade A")),
    ):
        assert f"| {said} | {' | '.join(found[rows_of][2:6])} |" in text
    device = found["device memory", "T4, A100"]
    assert f"on {device[2]} published runs" in text
    assert f"{device[4]} mean error" in text or f"{device[4]} in the mean" in text


def test_pages_say_of_real_cards_what_their_runs_say():
    lines = CARDS["read"]()
    tables = (("docs/emulator.md", "memory_table"), ("docs/accuracy.md", "step_table"))
    for page, table in tables:
        assert "\n".join(CARDS[table](lines)) in (ROOT / page).read_text(encoding="utf-8")


def test_steps_of_a_real_h100_are_predicted_within_15_percent():
    timed = [line for line in CARDS["read"]() if line["measured_step_ms"]]
    assert len(timed) == 18  # eleven trials, and the seven of a search that ran to their end
    errors = [abs(CARDS["difference"](line, "step_ms", "predicted") or 0.0) for line in timed]
    assert max(errors) < 0.15
    assert fmean(errors) < 0.06
    # Timelines of these come with tuner: the column has what is predicted now.
    for line in timed:
        if line["model"] == "qwen2.5-0.5b" or "attention=sdpa" in line["run"]:
            settings = dict(setting.split("=", 1) for setting in line["run"].split())
            space, configuration = one_configuration(None, line["model"], settings)
            found = estimate_configuration(space, configuration, get_gpu(line["gpu"]))
            now_ms = 1e3 * found.prediction.speed.step_s
            assert now_ms == pytest.approx(float(line["predicted_step_ms"]), rel=0.01)


def test_the_page_on_searches_counts_the_space_as_its_search_does():
    best = yaml.safe_load((ROOT / "results" / "qlora27b" / "a6000" / "best.yaml").read_text())
    number, within = load_space("qlora27b").count(use_floors=False), best["chosen_from"]["trials"]
    text = words("docs/fastest-settings.md")
    assert f"a space of {number:,} configurations, of which {within:,} have" in text
