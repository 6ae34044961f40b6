"""`tuner best --gpu all`: which GPU type is the cheapest for an epoch."""

import dataclasses
import json

import pytest
from cli_samples import make_trial, write_samples

from tuner.app.cli.main import run
from tuner.searches.journal import JournalWriter
from tuner.space.gpus import get_gpu

COMMAND = ["best", "--space", "tiny.yaml", "--gpu", "all"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def add(folder, gpu, gib, tokens_per_s, **settings):
    """A journal of one trial on `gpu`."""
    trial = make_trial(folder, gib, tokens_per_s, **settings)
    trial = dataclasses.replace(trial, gpu=gpu, gpu_memory_bytes=get_gpu(gpu).memory_bytes)
    with JournalWriter(folder / "results" / "tiny" / gpu / "trials.jsonl") as writer:
        writer.append(trial)


def test_cheapest_epoch_comes_first_not_the_fastest(folder, capsys):
    add(folder, "a6000", 20, 100, micro_batch=1, max_length=16)
    add(folder, "h100_sxm", 20, 120, micro_batch=2, max_length=16)  # faster, and costs far more
    add(folder, "a100_80gb", 99, 70, micro_batch=4, max_length=16)
    assert run(COMMAND) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    first, second = (
        next(i for i, line in enumerate(lines) if line.startswith(gpu))
        for gpu in ("a6000", "h100_sxm")
    )
    assert first < second
    assert "a100_80gb none of the 1 configurations fits" in " ".join(out.split())
    assert lines[first].split()[-1] == "1"  # the micro-batch
    assert max(map(len, lines[: second + 1])) <= 80
    assert run([*COMMAND, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [answer["gpu"]["id"] for answer in found] == ["a6000", "h100_sxm", "a100_80gb"]
    prices = [answer["run"]["cost_per_epoch_usd"] for answer in found[:2]]
    assert prices == sorted(prices)
    assert "reason" in found[2]


def test_nothing_that_fits_anywhere_says_why_for_each(folder, capsys):
    add(folder, "a6000", 20, 100, micro_batch=1)
    add(folder, "h100_sxm", 20, 120, micro_batch=2)
    assert run([*COMMAND, "--max-memory", "1GiB"]) == 1
    error = capsys.readouterr().err
    assert "a6000: none" in error
    assert "h100_sxm: none" in error
    assert error.count("hint") == 1


def test_no_results_are_refused(folder, capsys):
    assert run(COMMAND) == 3
    assert "`tuner search` on each GPU type" in capsys.readouterr().err


REPORT = ["report", "--space", "tiny.yaml", "--gpu"]


def test_the_named_types_have_reports(folder, capsys):
    add(folder, "a6000", 20, 100, micro_batch=1)
    add(folder, "h100_sxm", 20, 120, micro_batch=2)
    add(folder, "t4", 5, 20, micro_batch=1)
    assert run([*REPORT, "a6000,h100_sxm", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["gpu"] for one in found] == ["a6000", "h100_sxm"]
    assert all((folder / one["report"]).exists() for one in found)
    assert not (folder / "results" / "tiny" / "t4" / "report.html").exists()
    assert run([*REPORT, "all"]) == 0
    assert (folder / "results" / "tiny" / "t4" / "report.html").exists()


def test_no_report_is_drawn_where_one_type_was_not_searched(folder, capsys):
    add(folder, "a6000", 20, 100, micro_batch=1)
    assert run([*REPORT, "a6000,t4"]) == 3
    assert "on 't4'" in capsys.readouterr().err
    assert not (folder / "results" / "tiny" / "a6000" / "report.html").exists()
