"""A search that begins while its space is predicted: the baseline runs before the rest is there."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from device_fakes import profile_of

from tuner.app.device import cpu_label
from tuner.app.search.early import rough_bytes
from tuner.cost.speed.profile import profile_path
from tuner.predict.compiling import fork_beside
from tuner.searches.journal import read_journal
from tuner.space import load_space

ROOT = Path(__file__).parents[1]

SEARCH = ["--space", "tiny_cpu", "--gpu", "cpu", "--no-verify", "--budget", "0.2s",
          *(word for setting in ("max_length=64", "precision=fp32", "attention=sdpa",
                                 "optimizer=adamw_torch", "lora_rank=8")
            for word in ("--set", setting))]  # fmt: skip

# The prediction of all waits for a trial, so that it cannot be there before.
WAITING = """
import sys, time
from pathlib import Path
from tuner.app.cli.main import main
from tuner.predict.predictor import Predictor

predict, journal = Predictor.predict, Path(sys.argv[-1], "tiny_cpu", "cpu", "trials.jsonl")

def waiting(self, configurations, *args, **how):
    for _ in range(3000):
        if len(configurations) < 2 or journal.exists() and journal.read_text():
            return predict(self, configurations, *args, **how)
        time.sleep(0.1)

Predictor.predict = waiting
main()
"""


def test_the_rough_memory_of_a_baseline_tells_small_models_from_others():
    # A trial of it took 73.4 MiB on a processor, with what the process itself has.
    assert 50 * 2**20 < rough_bytes(load_space("tiny_cpu")) < 200 * 2**20
    assert rough_bytes(load_space("qlora27b")) > 16 * 27e9
    assert rough_bytes(load_space("naics_embedder")) == math.inf


def _counts(subject: list[int], item: int, _: None) -> int:
    subject.append(item)
    return len(subject)


def _sleeps(_: object, seconds: float, __: None) -> int:
    time.sleep(seconds)
    return os.getpid()


def _pid(*_: object) -> int:
    return os.getpid()


def test_a_fork_keeps_its_subject_from_task_to_task():
    with fork_beside([]) as fork:
        assert [fork.submit(_counts, 1).result(60), fork.submit(_counts, 2).result(60)] == [1, 2]


def test_a_paused_fork_works_on_when_it_may():
    with fork_beside(None) as fork:
        number = fork.submit(_pid, None).result(60)
        fork.pause(True)
        later = fork.submit(_pid, None)
        _until(lambda: _state(number) == "T")
        assert not later.done()
        fork.pause(False)
        assert later.result(60) == number


@pytest.mark.parametrize("paused", [False, True])
def test_a_fork_ends_with_its_block_in_the_middle_of_a_task(paused):
    started_s = time.monotonic()
    with fork_beside(None) as fork:
        number = fork.submit(_pid, None).result(60)
        fork.submit(_sleeps, 600.0)
        fork.pause(paused)
    assert _state(number) == ""
    assert time.monotonic() - started_s < 60


def _until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def _state(process: int) -> str:
    """The letter of a process's state; "" if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.slow
def test_the_baseline_is_tried_before_all_is_predicted(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TUNER_PROFILES", str(tmp_path / "profiles"))
    # Measuring the processor would import torch, after which forks cannot trace.
    profile_of(cpu_label()).save(profile_path(cpu_label()))
    monkeypatch.setenv("COLUMNS", "200")
    command = ["search", *SEARCH, "--trials", "2", "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", WAITING, *command], check=True, text=True, stdout=subprocess.PIPE
    )
    text = done.stdout
    assert text.index("1/2 done") < text.index("predicted all 6 configurations")
    assert "2 new trials" in text
    assert "Predicted against measured (2 trials)" in text
    records = read_journal(tmp_path / "tiny_cpu" / "cpu" / "trials.jsonl").records
    (run,) = {record.run_id for record in records}
    assert [record.trial_id for record in records] == [f"{run}-{n:03}" for n in (1, 2)]
    assert {record.searcher for record in records} == {"guided"}
    assert all(record.outcome.prediction is not None for record in records)
    baseline = records[0].configuration
    assert (baseline["micro_batch"], baseline["gradient_checkpointing"]) == (2, True)
