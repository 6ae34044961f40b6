"""`tuner report-run`: rows of measured trials, and the page that is made of them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tomllib
from pathlib import Path

import pytest

from tuner.app.cli.main import run
from tuner.app.machine_facts import tested
from tuner.app.search.result_files import reported_runs
from tuner.app.targets import load_targets
from tuner.searches.journal import read_journal
from tuner.searches.store import ResultsFolder

ROOT = Path(__file__).resolve().parents[2]
WHERE = ("--space", "tiny_cpu", "--gpu", "cpu")


def test_a_row_has_predicted_beside_measured_and_the_fastest_comes_first(capsys):
    assert run(["report-run", *WHERE]) == 0
    told = capsys.readouterr()
    rows = [json.loads(line) for line in told.out.splitlines()]
    speeds = [row["configuration"]["effective_batch"] / row["measured"]["step_s"] for row in rows]
    assert len(rows) > 5
    assert speeds == pytest.approx(sorted(speeds, reverse=True), rel=0.02)
    assert all(row["measured"].keys() <= row["predicted"].keys() for row in rows)
    assert "nothing was sent" in told.err


def test_nothing_private_is_in_a_row(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "results" / "tiny_cpu", tmp_path / "results" / "tiny_cpu")
    secret = str(tmp_path / "secret")
    folder = ResultsFolder(tmp_path / "results", "tiny_cpu", "cpu")
    records = read_journal(folder.journal).records
    folder.journal.unlink()
    with folder.writer() as writer:
        for record in records:
            private = record.configuration.replace(data=secret)
            versions = {**record.versions, "model": f"{secret} 356d8390dd8725ec"}
            writer.append(
                dataclasses.replace(record, configuration=private, run_id=secret, versions=versions)
            )
    monkeypatch.chdir(tmp_path)
    (target,) = load_targets("tiny_cpu", ["cpu"], results=tmp_path / "results")
    target = dataclasses.replace(target, space=dataclasses.replace(target.space, model=secret))
    rows = reported_runs(target)
    assert rows
    assert secret not in json.dumps(rows)
    assert all(row["model"] == "architecture 356d8390dd8725ec" for row in rows)


def test_what_was_only_predicted_is_no_run(capsys):
    assert run(["report-run", "--space", "qlora27b", "--gpu", "a6000"]) == 3
    assert "was measured on NVIDIA RTX A6000" in capsys.readouterr().err


def test_the_pinned_extra_names_the_tested_versions():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    pinned = dict(line.split("==") for line in extras["pinned"] if "==" in line)
    wanted = {line.split(">=")[0] for line in extras["all"]} - {"ray[default,tune]"} | {"ray"}
    assert pinned == {name: tested()[name] for name in wanted}
