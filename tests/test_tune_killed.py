"""A search that is killed at random moments and started again ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from cli_samples import write_samples

from benchmarks import kill_points

ROOT = Path(__file__).parents[1]

PROGRAM = """
import sys
from pathlib import Path
from tune_fakes import GPU, FakeFactory, FakeSpace, outcome_of
from tuner.results.journal import JournalWriter, read_journal
from tuner.tune.driver import search
from tuner.tune.request import SearchRequest

journal, log = Path(sys.argv[1]), Path(sys.argv[2])
log.mkdir(exist_ok=True)
space = FakeSpace()
with JournalWriter(journal) as writer:
    search(
        SearchRequest(
            space=space, gpu=GPU, runner_factory=FakeFactory(log=log, sleep_s=float(sys.argv[3])),
            trials=int(sys.argv[4]), seed=7, searcher=sys.argv[5], max_concurrent=1,
            predictions={c.key: outcome_of(c).prediction for c in space.configurations()},
            initial=list(space.configurations())[5:6],
            resume=read_journal(journal).records, versions={"tuner": "1"},
        ),
        on_record=writer.append,
    )
"""


def start(folder: Path, *, sleep_s: float, trials: int, searcher: str) -> subprocess.Popen[bytes]:
    """The same command each time, in a session of its own."""
    arguments = [str(folder / "trials.jsonl"), str(folder / "log"), str(sleep_s), str(trials)]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments, searcher],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
        },
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    _, error = process.communicate(timeout=600)
    assert process.returncode == 0, error.decode()


def ended(folder: Path) -> int:
    journal = folder / "trials.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def results(folder: Path) -> list[tuple[str, object]]:
    """What each trial was and came to, in the order of the journal."""
    lines = (folder / "trials.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(r["status"], r["configuration"], r["predicted"]["memory"]) for r in records]


def check(folder: Path, *, kills: int, searcher: str) -> None:
    whole, broken = folder / "w", folder / "b"
    for each in (whole, broken):
        each.mkdir()
    trials = 3 * kills
    finish(start(whole, sleep_s=0.0, trials=trials, searcher=searcher))
    rng = random.Random(kills)
    for _ in range(kills):
        before = ended(broken)
        process = start(broken, sleep_s=0.15, trials=trials, searcher=searcher)
        # Somewhere between its start and the third trial from here on.
        until = time.monotonic() + 300
        wanted = before + rng.randrange(0, 3)
        while ended(broken) < wanted and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert ended(broken) >= before
    finish(start(broken, sleep_s=0.0, trials=trials, searcher=searcher))
    assert results(broken) == results(whole)
    # What was under way at a kill ran again, and nothing that had ended did.
    begun = len(list((broken / "log").iterdir()))
    assert trials <= begun <= trials + kills


@pytest.mark.slow
@pytest.mark.parametrize("searcher", ["guided", "tpe"])
def test_killed_twice_it_ends_as_if_undisturbed(tmp_path_factory, searcher):
    check(tmp_path_factory.mktemp("k"), kills=2, searcher=searcher)


COMMAND = ["search", "--space", "tiny.yaml", "--gpu", "a6000", "--where", "lora_rank >= 4",
           "--set", "precision=fp16",
           "--trials", "12", "--seed", "7", "--workers", "1", "--quiet"]  # fmt: skip


def start_command(folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tuner", *COMMAND],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def front_of(folder: Path) -> list[str]:
    """The lines of the front, without the names of trials: each run gives its own."""
    lines = (folder / "pareto.csv").read_text().splitlines()
    assert lines[0].endswith(",trial_id")
    return [line.rpartition(",")[0] for line in lines]


@pytest.mark.slow
def test_the_command_killed_twice_ends_with_the_front_of_one_that_was_not(tmp_path_factory):
    """`tuner search` itself; the second kill, at least, is in the middle of its trials."""
    whole, broken = (tmp_path_factory.mktemp(name) for name in ("w", "b"))
    for folder in (whole, broken):
        write_samples(folder)
    finish(start_command(whole))
    rng = random.Random(7)
    in_whole, in_broken = (f / "results" / "tiny" / "a6000" for f in (whole, broken))
    for wanted in (rng.randrange(0, 2), rng.randrange(3, 6)):
        before = ended(in_broken)
        process = start_command(broken)
        until = time.monotonic() + 300
        while ended(in_broken) < wanted and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert before <= ended(in_broken) < 12
    finish(start_command(broken))
    assert ended(in_broken) == ended(in_whole) == 12
    assert results(in_broken) == results(in_whole)
    assert front_of(in_broken) == front_of(in_whole)
    best, other = (
        yaml.safe_load((folder / "best.yaml").read_text()) for folder in (in_broken, in_whole)
    )
    assert best["configuration"] == other["configuration"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["worker", "raylet"])
def test_a_search_whose_process_is_killed_ends_or_runs_again_to_the_same_front(
    tmp_path_factory, kind
):
    """Two of the points of `benchmarks/kill_points.py`, with the one for the driver above."""
    folder = tmp_path_factory.mktemp("k")
    arguments = kill_points.SIMULATED
    calm = kill_points.undisturbed(kill_points.Search(folder / "calm", arguments))
    broken = kill_points.Search(folder / "broken", arguments)
    point = kill_points.run_point(broken, kind, random.Random(2), calm)
    assert point.problems == []
    assert point.exit_code == 0 or (kind == "raylet" and point.exit_code == 3)


@pytest.mark.skipif(
    "TUNER_KILL_TEN_TIMES" not in os.environ, reason="two minutes: set TUNER_KILL_TEN_TIMES=1"
)
@pytest.mark.parametrize("searcher", ["guided", "tpe", "optuna.samplers:NSGAIISampler"])
def test_killed_ten_times_it_ends_as_if_undisturbed(tmp_path_factory, searcher):
    check(tmp_path_factory.mktemp("k"), kills=10, searcher=searcher)
