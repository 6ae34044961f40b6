"""Trials of several ranks: whose failure is the trial's, and that no rank outlives it."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from runner_bodies import CLOCK, measurement
from waiting import is_alive

from tuner.core.outcome import Raised, is_lost_peer
from tuner.core.records import Configuration, Measurement, Outcome, RankMemory, Status
from tuner.space.gpus import get_gpu
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.isolated import IsolatedRunner
from tuner.trial.ranks import merged

JOB = TrialJob("causal_lm", "tiny", get_gpu("a6000"))


def runner() -> IsolatedRunner:
    return IsolatedRunner(
        JOB, MeasureOptions(device="cpu", timeout_s=600.0), body="rank_bodies:RANKS"
    )


def run(folder: Path, act: str, *, guilty: int = 1, ranks: int = 2) -> Outcome:
    values = {"act": act, "guilty": guilty, "ranks": ranks, "folder": str(folder)}
    with runner() as found:
        outcome = found.run(Configuration(values))
    assert not any(map(is_alive, pids(folder))), "a rank outlived its trial"
    return outcome


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("pid*") if file.read_text()]


def test_ranks_that_end_well_are_one_measurement(tmp_path):
    outcome = run(tmp_path, "good", ranks=3)
    assert outcome.status is Status.OK
    assert len(outcome.measurement.ranks) == 3


@pytest.mark.parametrize("guilty", [0, 1])
def test_out_of_memory_in_one_rank_is_the_trials_and_names_the_rank(tmp_path, guilty):
    outcome = run(tmp_path, "oom", guilty=guilty)
    assert outcome.status is Status.OOM
    assert outcome.requested_bytes == 2 * 2**30
    assert outcome.phase == "backward"
    assert f"rank {guilty}" in outcome.message


@pytest.mark.parametrize(
    ("act", "text"),
    [
        ("crash", "rank 1: a bug of a library"),
        ("killed", "rank 1 was ended by SIGKILL"),
        ("segfault", "rank 1 was ended by SIGSEGV"),
        ("exit", "rank 1 ended without a result (exit code 3)"),
    ],
)
def test_a_rank_that_breaks_is_named_not_those_that_lost_it(tmp_path, act, text):
    outcome = run(tmp_path, act)
    killed = "SIGKILL" in text  # from outside: it would be tried again
    assert outcome.status is (Status.INTERRUPTED if killed else Status.CRASHED)
    assert text in outcome.message


def test_what_is_wrong_in_every_rank_is_said_without_a_rank(tmp_path):
    outcome = run(tmp_path, "invalid")
    assert outcome.status is Status.INVALID
    assert outcome.message == "this cannot be built"


def test_a_rank_that_hangs_ends_with_the_trials_time(tmp_path, monkeypatch):
    clock = tmp_path / "clock"
    monkeypatch.setenv(CLOCK, str(clock))

    def end_time() -> None:
        while not (tmp_path / "hangs").exists():
            time.sleep(0.02)
        clock.touch()

    waiting = threading.Thread(target=end_time)
    waiting.start()
    outcome = run(tmp_path, "hang", guilty=1)
    waiting.join()
    assert outcome.status is Status.TIMEOUT
    assert len(pids(tmp_path)) == 2


def test_the_ranks_end_when_the_trial_is_killed(tmp_path):
    """Whoever kills the trial's own process need not know of its ranks."""

    def kill_parent() -> None:
        while not (tmp_path / "hangs").exists():
            time.sleep(0.02)
        rank = pids(tmp_path)[0]
        stat = Path(f"/proc/{rank}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)

    killing = threading.Thread(target=kill_parent)
    killing.start()
    outcome = run(tmp_path, "hang", guilty=0)
    killing.join()
    # Out of memory where the kernel kills meanwhile.
    assert outcome.status in (Status.INTERRUPTED, Status.OOM)


def rank_measurement(device_bytes: int, **changes: object) -> Measurement:
    found = measurement()
    return replace(found, memory=replace(found.memory, device_bytes=device_bytes), **changes)


def test_the_rank_with_most_memory_decides_and_all_are_recorded():
    parts = [rank_measurement(n, gpu_utilization=n / 10) for n in (5, 9, 7)]
    whole = merged(parts)
    assert whole.memory.device_bytes == 9
    assert [rank.device_bytes for rank in whole.ranks] == [5, 9, 7]
    assert whole.gpu_utilization == pytest.approx(0.7)
    assert whole.speed == parts[0].speed  # rates are of the whole in every rank
    assert Measurement.from_dict(whole.to_dict()) == whole


def test_a_measurement_of_an_older_journal_has_no_ranks():
    data = measurement().to_dict()
    assert "ranks" not in data
    assert Measurement.from_dict(data).ranks == ()
    assert RankMemory.of(measurement().memory).device_bytes == measurement().memory.device_bytes


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:4",
        "NCCL error in: ProcessGroupNCCL.cpp:77, remote process exited or a network error",
        "recvValue failed: Connection reset by peer",
    ],
)
def test_texts_of_lost_peers(text):
    assert is_lost_peer(str(Raised(("builtins.RuntimeError",), text)))
    assert not is_lost_peer("CUDA out of memory. Tried to allocate 2.00 GiB")
