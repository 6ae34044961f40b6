"""Searches as jobs of a real job server on this machine, with the commands of docs/cluster.md."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_samples import write_samples
from documents import blocks, commands
from job_server import TOKEN, job_cluster

from tuner.app.cli.main import run
from tuner.searches.journal import read_journal

AUTHORIZED = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
STOP_WAIT = {"RAY_JOB_STOP_WAIT_TIME_S": "120"}
"""The head nodes of the three cluster files have it too (tests/test_cluster_files.py)."""
PATIENCE_S = 1200
"""A search takes ten seconds on an idle machine."""

PAGE_SPACE, PAGE_RESULTS = "mine.yaml", "/home/ubuntu/results"

Ray = Callable[..., str]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """The folder from which jobs are submitted."""
    folder = tmp_path_factory.mktemp("home")
    write_samples(folder)
    return folder


@pytest.fixture(scope="module")
def ray(home, tmp_path_factory) -> Iterator[Ray]:
    """Runs `ray job ...` in `home` against a job server, and returns what it prints."""
    folder = tmp_path_factory.mktemp("jobs") / "cluster"
    with job_cluster(folder, {**AUTHORIZED, **STOP_WAIT}) as cluster:
        environment = {**os.environ, **AUTHORIZED, "RAY_API_SERVER_ADDRESS": cluster.url}

        def said(*arguments: str) -> str:
            ended = subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", *arguments],
                env=environment, cwd=home, capture_output=True, text=True, check=False,
                timeout=PATIENCE_S,
            )  # fmt: skip
            assert ended.returncode == 0, f"{arguments}: {ended.stdout}{ended.stderr}"
            return ended.stdout

        yield said


def page_lines(results: Path, *more: str) -> dict[str, list[str]]:
    """The arguments of the `ray job` lines of the page, by subcommand, for the space of the tests.

    `more` are further options of `tuner search`.
    """
    (script,) = [
        command.line
        for block in blocks("docs/cluster.md")
        if block.language == "sh" and "ray job logs" in block.text
        for command in commands(block)
    ]
    found = {}
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:2] == ["ray", "job"]:
            put = {PAGE_SPACE: "tiny.yaml", PAGE_RESULTS: str(results)}
            found[words[2]] = [put.get(word, word) for word in words[1:]]
    found["submit"] += more
    return found


PREDICTED = ("--mode", "predict", "--set", "precision=bf16", "--where", "lora_rank >= 8")


@pytest.mark.slow
def test_the_pages_commands_run_a_search_and_it_says_where_the_results_are(
    ray, home, tmp_path, monkeypatch
):
    there = tmp_path / "there"
    lines = page_lines(there, *PREDICTED, "--trials", "2")
    # A relative folder would be in Ray's copy of `home`.
    lost = [word.replace(str(there), "results") for word in lines["submit"]]
    ray(*[word.replace("first", "lost") for word in lost])
    ray(*lines["submit"])
    assert "Recommended (predicted)" in ray(*lines["logs"])
    assert "in Ray's copy of the job's working directory" in ray("job", "logs", "lost", "--follow")
    folder = there / "tiny" / "a6000"
    records = read_journal(folder / "trials.jsonl").records
    assert len(records) == 2
    assert (folder / "report.html").is_file()
    assert not (home / "results").exists()
    monkeypatch.chdir(home)
    assert run(["best", "--space", "tiny.yaml", "--gpu", "a6000", "--results", str(there)]) == 0


@pytest.mark.slow
def test_a_stopped_job_keeps_its_trials_and_report_makes_its_files(
    ray, home, tmp_path, monkeypatch
):
    results = tmp_path / "results"
    # Nearly every configuration may be on a front of four objectives, and is traced.
    names = ("throughput", "memory", "lora_rank", "length_coverage")
    objectives = [word for name in names for word in ("--objective", name)]
    wide = ("--mode", "predict", "--where", "lora_rank >= 4", "--workers", "1", "--trials", "60")
    lines = page_lines(results, *wide, *objectives)
    ray(*[word.replace("first", "long") for word in lines["submit"]])
    journal = results / "tiny" / "a6000" / "trials.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while not (journal.is_file() and read_journal(journal).records):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    ray(*[word.replace("first", "long") for word in lines["stop"]])
    states = re.findall(r"submission_id='(\w+)'.*?JobStatus\.(\w+)", ray(*lines["list"]))
    assert dict(states) == {"first": "SUCCEEDED", "lost": "FAILED", "long": "STOPPED"}
    assert 1 <= len(read_journal(journal).records) < 60
    # Ray may end the search before it has written its other files.
    monkeypatch.chdir(home)
    options = ["--space", "tiny.yaml", "--gpu", "a6000", "--results", str(results)]
    assert run(["report", *options]) == 0
    assert (journal.parent / "report.html").is_file()
