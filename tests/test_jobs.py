"""Searches sent to a real job server on this machine, two at once, and their results at home."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cli_samples import write_samples
from job_server import TOKEN, JobCluster, job_cluster

from tuner.cli.main import run
from tuner.records import TrialRecord
from tuner.results.journal import read_journal
from tuner.tune.jobs import KIND, SEARCH, JobServer, State, connect

PATIENCE_S = 1200
"""A search takes ten seconds on an idle machine."""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    write_samples(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        patch.delenv("RAY_AUTH_MODE", raising=False)
        yield folder


@pytest.fixture(scope="module")
def cluster(home) -> Iterator[JobCluster]:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    with job_cluster(home / "cluster", token) as found, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_API_SERVER_ADDRESS", found.url)
        yield found


@pytest.fixture(scope="module")
def server(cluster) -> JobServer:
    return connect()


@pytest.fixture(scope="module")
def submitted(cluster, server) -> dict[str, str]:
    """Two searches that run at the same time: job ids by GPU type."""
    found = {}
    for gpu, precision in (("a6000", "bf16"), ("t4", "fp16")):
        found[gpu] = f"mine-{gpu}"
        command = ["submit", "--space", "tiny.yaml", "--gpu", gpu, "--id", found[gpu]]
        how = ["--trials", "3", "--mode", "predict", "--set", f"precision={precision}"]
        assert run([*command, *how]) == 0
    return found


@pytest.fixture(scope="module")
def ended(submitted, server) -> dict[str, str]:
    for job_id in submitted.values():
        job = server.wait(job_id, PATIENCE_S)
        assert job.state is State.DONE, server.logs(job_id)[-2000:]
    return submitted


def said(capsys, *arguments: str, code: int = 0) -> str:
    """What a command prints, both ways."""
    capsys.readouterr()
    assert run(list(arguments)) == code, capsys.readouterr()
    found = capsys.readouterr()
    return found.out + found.err


def journal(results: Path, gpu: str) -> tuple[TrialRecord, ...]:
    return read_journal(results / "tiny" / gpu / "trials.jsonl").records


def on_cluster(cluster: JobCluster, job_id: str) -> Path:
    return cluster.jobs / job_id / "results"


# A search is one sentence: sent, seen, followed, fetched. The tests go on from one another.


@pytest.mark.slow
def test_two_searches_at_once_come_home_apart(cluster, ended, home, capsys):
    listed = {job["id"]: job for job in json.loads(said(capsys, "jobs", "--json"))}
    first, second = (listed[job_id] for job_id in ended.values())
    assert first["started_s"] < second["ended_s"]
    assert second["started_s"] < first["ended_s"]  # they did run at the same time
    for gpu, job_id in ended.items():
        assert listed[job_id]["gpu"] == gpu
        text = said(capsys, "fetch", job_id)
        number = len(journal(on_cluster(cluster, job_id), gpu))
        assert f"{number} trials of the job, {number} new here" in text
    for gpu, job_id in ended.items():
        records = journal(home / "results", gpu)
        assert 1 <= len(records) <= 3
        assert {record.gpu for record in records} == {gpu}
        assert records == journal(on_cluster(cluster, job_id), gpu)
        assert [p.name for p in on_cluster(cluster, job_id).glob("tiny/*")] == [gpu]
        shown = json.loads(said(capsys, "show", "--space", "tiny.yaml", "--gpu", gpu, "--json"))
        assert {r["trial_id"] for r in shown["front"]} <= {r.trial_id for r in records}
        assert shown["trials"] > len(records)  # the whole space came, too
        here = home / "results" / "tiny" / gpu
        there = on_cluster(cluster, job_id) / "tiny" / gpu
        assert (here / "pareto.csv").read_text() == (there / "pareto.csv").read_text()
        assert settings_in(here / "best.yaml") == settings_in(there / "best.yaml")


def settings_in(path: Path) -> dict[str, object]:
    """What is recommended in a file, without how it was found."""
    found = yaml.safe_load(path.read_text())
    assert found.pop("search")
    assert found
    return found


@pytest.mark.slow
def test_fetching_again_changes_nothing(ended, server, home, capsys):
    path = home / "results/tiny/a6000/trials.jsonl"
    before = path.read_bytes()
    assert " trials of the job, 0 new here" in said(capsys, "fetch", ended["a6000"])
    assert path.read_bytes() == before
    # The jobs that read files are nobody's business.
    assert {job.id for job in server.jobs()} == set(ended.values())


@pytest.mark.slow
def test_logs_tell_the_search_followed_or_not(ended, capsys):
    once = said(capsys, "logs", ended["a6000"])
    assert "Recommended (predicted)" in once
    assert "mine-a6000: done" in once
    assert "Recommended (predicted)" in said(capsys, "logs", ended["a6000"], "--follow")


@pytest.mark.slow
def test_a_search_is_stopped_and_what_it_did_comes_home(server, submitted, home, capsys):
    where = ["--space", "tiny.yaml", "--gpu", "l4", "--mode", "predict", "--workers", "1"]
    where += ["--where", "lora_rank >= 4", "--trials", "60"]
    # Nearly every configuration may be on a front over so many, and is traced.
    for objective in ("throughput", "memory", "lora_rank", "length_coverage"):
        where += ["--objective", objective]
    assert run(["submit", *where, "--id", "stopped"]) == 0
    # Followed until the first trial has ended.
    seen = threading.Event()
    text = ""
    for piece in server.follow("stopped"):
        text += piece
        if " done, " in text:
            seen.set()
            break
    assert seen.is_set(), text
    assert "stopped: stopped" in said(capsys, "stop", "stopped")
    assert "stopped: stopped already" in said(capsys, "stop", "stopped")
    fetched = json.loads(said(capsys, "fetch", "stopped", "--json"))["fetched"]
    assert 1 <= fetched[0]["trials"] < 60
    assert len(journal(home / "results", "l4")) == fetched[0]["trials"]


@pytest.mark.slow
def test_a_failed_job_is_told_with_its_last_lines(server, submitted, capsys):
    command = ["tuner", "cluster-job", "run", "broken", "--", "--space", "nope", "--gpu", "t4"]
    server.submit("broken", shlex.join(command), metadata={KIND: SEARCH})
    assert server.wait("broken", PATIENCE_S).state is State.FAILED
    assert "failed (exit 2)" in said(capsys, "logs", "broken")
    text = said(capsys, "fetch", "broken", code=3)
    assert "left no trial: failed (exit 2)" in text
    assert "unknown search space 'nope'" in text


@pytest.mark.slow
@pytest.mark.parametrize("command", ["logs", "stop", "fetch"])
def test_a_job_that_nobody_knows_is_said(server, capsys, command):
    assert "knows no job 'nobody'" in said(capsys, command, "nobody", code=2)


@pytest.mark.slow
def test_an_id_is_used_once(ended, capsys):
    again = ["submit", "--space", "tiny.yaml", "--gpu", "t4", "--mode", "predict"]
    text = said(capsys, *again, "--id", ended["t4"], code=2)
    assert "the cluster has a job 'mine-t4' already" in text


@pytest.mark.slow
def test_results_outlive_the_clusters_memory_of_the_job(ended, server, home, capsys):
    server.forget(ended["t4"])
    number = len(journal(home / "results", "t4"))
    found = json.loads(said(capsys, "fetch", ended["t4"], "--results", "later", "--json"))
    assert [(f["gpu"], f["trials"], f["added"]) for f in found["fetched"]] == [
        ("t4", number, number)
    ]
    assert journal(home / "later", "t4") == journal(home / "results", "t4")


@pytest.mark.slow
def test_without_the_token_nobody_is_let_in(cluster, tmp_path):
    """In processes of their own: what Ray has read as a token stays in this one."""
    nowhere = {**os.environ, "HOME": str(tmp_path)}  # nothing in ~/.ray
    nowhere.pop("RAY_AUTH_TOKEN")
    nowhere.pop("RAY_AUTH_MODE", None)
    for changes, problem in (
        ({"RAY_AUTH_TOKEN": "another"}, "has another token than this machine"),
        ({}, "asks for a token, and there is none here"),
        ({"RAY_AUTH_MODE": "token"}, "there is no token"),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "tuner", "jobs"],
            env={**nowhere, **changes}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 3, ended
        assert problem in " ".join(ended.stderr.split())


@pytest.mark.slow
def test_the_job_server_listens_on_this_machine_only(cluster):
    port = int(cluster.url.rpartition(":")[2])
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].partition(":")[2], 16) == port
    ]  # fmt: skip
    assert {address.partition(":")[0] for address in listening} == {"0100007F"}
