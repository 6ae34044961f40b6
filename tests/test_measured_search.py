"""`tuner search --gpu cpu` for real: training runs on this machine's processor."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from started import start

from tuner.app.cli.main import run
from tuner.core import host
from tuner.core.records import Status
from tuner.searches.journal import read_journal

ROOT = Path(__file__).parents[1]

# One structure to predict, and steps of a few milliseconds.
NARROW = ("max_length=64", "precision=fp32", "attention=sdpa", "gradient_checkpointing=false",
          "optimizer=adamw_torch")  # fmt: skip
TARGET = ["--space", "tiny_cpu", "--gpu", "cpu"]
SEARCH = ["search", *TARGET, *(word for setting in NARROW for word in ("--set", setting))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def processes_in(folder: Path) -> list[str]:
    """Command lines of the processes that work in a folder: the search and all it started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) != os.getpid() and (process / "cwd").resolve() == folder:
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it has ended, or is not ours
    return [command for command in found if command]


def wait_until_gone(folder: Path) -> None:
    until = time.monotonic() + 120
    while left := processes_in(folder):
        assert time.monotonic() < until, left
        time.sleep(0.1)


@pytest.mark.slow
def test_search_measures_and_goes_on_from_what_it_measured(folder, capsys):
    process = start(*SEARCH, "--trials", "3", "--budget", "0.3s")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    assert "Traceback" not in out + err
    text = " ".join(out.split())
    for part in (f"measured on {host.cpu_name()}", "3 configurations: 3 fit",
                 "Pareto front (measured)", "Recommended (measured)"):  # fmt: skip
        assert part in text, part
    wait_until_gone(folder)

    results = folder / "results" / "tiny_cpu" / "cpu"
    records = read_journal(results / "trials.jsonl").records
    assert {r.outcome.status for r in records} == {Status.OK}
    # The fastest is verified; on a busy machine another may be the fastest after that.
    tried, verified = records[:3], records[3:]
    assert not any(r.verification for r in tried)
    assert verified
    for record in verified:
        assert record.verified
        assert record.configuration in [r.configuration for r in tried]
        assert record.outcome.measurement.checkpoint_bytes > 0
    assert "longest sequences, an evaluation, a checkpoint of" in text
    for record in records:
        measurement = record.outcome.measurement
        assert record.outcome.prediction is None  # of a processor there is none
        assert record.device == measurement.device == host.cpu_name()
        assert record.gpu_memory_bytes == host.usable_memory_bytes()
        assert measurement.steps >= 3 or measurement.stopped_by == "dominated"
        assert measurement.speed.step_s > 0
    assert "# Every number of memory, speed, time and cost below is MEASURED" in (
        results / "best.yaml"
    ).read_text().replace(chr(10), " ")

    assert run(["best", *TARGET, "--where", "lora_rank >= 4", "--where", "max_length >= 64",
                "--json"]) == 0  # fmt: skip
    best = json.loads(capsys.readouterr().out)
    assert best["source"] == "measured"
    assert yaml.safe_load((results / "best.yaml").read_text())["speed"] == best["speed"]

    # The same again: all is known.
    again = start(*SEARCH, "--trials", "3", "--json")
    answer = json.loads(again.communicate(timeout=600)[0])
    assert (answer["reused"], answer["trials"]) == (len(records), len(records))
    assert answer["source"] == "measured"
    assert answer["best"]["verified"] is True


@pytest.mark.proof
def test_ctrl_c_in_the_middle_of_a_trial_leaves_no_process(folder):
    process = start(*SEARCH, "--trials", "9", "--budget", "60s", "--quiet")
    until = time.monotonic() + 600
    while not any("tuner.trial.warm" in command for command in processes_in(folder)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, out + err
    assert "Traceback" not in out + err
    wait_until_gone(folder)


@pytest.mark.proof
def test_limit_that_is_too_small_is_an_oom_with_its_phase(folder, capfd):
    asked = ["--space", "tiny_cpu", "--set", "micro_batch=8", "--set", "max_length=128"]
    asked += ["--memory-limit", "48MiB", "--device", "cpu", "--budget", "0.3s", "--json"]
    assert run(["trial", *asked]) == 1
    answer = json.loads(capfd.readouterr().out)
    assert (answer["status"], answer["fits"]) == ("oom", False)
    assert answer["phase"] in ("load", "forward", "backward", "optimizer")
    assert answer["memory_limit_bytes"] == 48 * 2**20
    assert answer["measured"] is None
