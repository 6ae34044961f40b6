"""Searches as jobs of a real job server on this machine, with the commands of
docs/reference/ray-jobs.md."""

import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from cli_samples import write_samples
from documents import blocks, commands
from job_server import TOKEN, job_cluster
from started import run_python

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
            ended = run_python(
                "-m",
                "ray.scripts.scripts",
                *arguments,
                env=environment,
                cwd=home,
                timeout=PATIENCE_S,
            )
            assert ended.returncode == 0, f"{arguments}: {ended.stdout}{ended.stderr}"
            return ended.stdout

        yield said


def page_lines(results: Path, *more: str) -> dict[str, list[str]]:
    """The arguments of the `ray job` lines of the page, by subcommand, for the space of the tests.

    `more` are further options of `tuner search`.
    """
    (script,) = [
        command.line
        for block in blocks("docs/reference/ray-jobs.md")
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


@pytest.mark.proof
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
    states = dict(re.findall(r"submission_id='(\w+)'.*?JobStatus\.(\w+)", ray(*lines["list"])))
    assert states == {"first": "SUCCEEDED", "lost": "FAILED"}
    folder = there / "tiny" / "a6000"
    records = read_journal(folder / "trials.jsonl").records
    assert len(records) == 2
    assert (folder / "report.html").is_file()
    assert not (home / "results").exists()
    monkeypatch.chdir(home)
    assert run(["best", "--space", "tiny.yaml", "--gpu", "a6000", "--results", str(there)]) == 0


def driver_of(results: Path) -> psutil.Process:
    """The process of the search that writes to `results`: not its shell, nor one of its forks."""
    named = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (words := process.info["cmdline"] or [])[1:4] == ["-m", "tuner", "search"]
        and str(results) in words
    ]
    return min(named, key=lambda process: process.create_time())


@pytest.mark.proof
def test_a_killed_job_goes_on_under_another_id_and_a_stopped_one_writes_its_results(ray, tmp_path):
    results = tmp_path / "results"
    # Nearly every configuration may be on a front of four objectives, and is traced.
    names = ("throughput", "memory", "lora_rank", "length_coverage")
    objectives = [word for name in names for word in ("--objective", name)]
    wide = ("--mode", "predict", "--where", "lora_rank >= 4", "--trials", "400")
    lines = page_lines(results, *wide, *objectives)
    journal = results / "tiny" / "a6000" / "trials.jsonl"

    def job(command: str, name: str) -> str:
        return ray(*[word.replace("first", name) for word in lines[command]])

    def wait_for(records: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (journal.is_file() and len(read_journal(journal).records) >= records):
            assert time.monotonic() < deadline
            time.sleep(0.5)

    job("submit", "killed")
    wait_for(1)
    driver = driver_of(results)
    driver.suspend()  # on a fast machine it would be ready before it is killed
    job("submit", "beside")
    assert "another search is writing to" in job("logs", "beside")
    driver.kill()
    job("logs", "killed")
    kept = read_journal(journal).records
    assert len(kept) < 400
    job("submit", "again")
    wait_for(len(kept) + 1)
    job("stop", "again")
    log = job("logs", "again")
    assert f"{len(kept)} traces from" in log
    assert "interrupted; the same command continues from here" in log
    assert "Traceback" not in log
    assert read_journal(journal).records[: len(kept)] == kept
    states = dict(re.findall(r"submission_id='(\w+)'.*?JobStatus\.(\w+)", ray(*lines["list"])))
    assert {name: states[name] for name in ("killed", "beside", "again")} == {
        "killed": "FAILED", "beside": "FAILED", "again": "STOPPED",
    }  # fmt: skip
    assert (journal.parent / "report.html").is_file()
