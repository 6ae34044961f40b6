"""A search that is killed at random moments and started again ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from shared_cases import kill_points

PROGRAM = """
import sys
from pathlib import Path
from tune_fakes import GPU, FakeFactory, FakeSpace, outcome_of
from tuner.searches.journal import JournalWriter, read_journal
from tuner.searches.ray.driver import search
from tuner.searches.request import SearchRequest

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
def test_killed_twice_it_ends_as_if_undisturbed(tmp_path_factory):
    check(tmp_path_factory.mktemp("k"), kills=2, searcher="tpe")


@dataclass(frozen=True, slots=True)
class Calm:
    """The search that nobody kills, and what it found."""

    search: kill_points.Search
    found: kill_points.Undisturbed


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Calm:
    search = kill_points.Search(tmp_path_factory.mktemp("k") / "calm")
    return Calm(search, kill_points.undisturbed(search))


@pytest.mark.slow
def test_the_command_killed_in_its_trials_ends_as_one_that_was_not(tmp_path_factory, calm):
    """`tuner search` itself; what is killed twice has fakes above."""
    trials = kill_points.TRIALS
    broken = kill_points.Search(tmp_path_factory.mktemp("k") / "broken")
    process = broken.start()
    until = time.monotonic() + 300
    wanted = random.Random(7).randrange(1, 6)
    while broken.ended() < wanted and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 1 <= broken.ended() < trials
    assert broken.start().wait(600) == 0, broken.said()
    assert broken.ended() == calm.search.ended() == trials
    point = kill_points.Point("driver")
    kill_points.compare(broken, calm.found, point)
    assert point.problems == []


@pytest.mark.slow
def test_a_search_whose_worker_is_killed_ends_as_one_that_was_left_alone(tmp_path_factory, calm):
    """Ray's own losses are in test_local_ray."""
    broken = kill_points.Search(tmp_path_factory.mktemp("k") / "broken")
    point = kill_points.run_point(broken, "worker", random.Random(2), calm.found)
    assert point.problems == []
    assert point.exit_code == 0


@pytest.mark.skipif(
    "TUNER_KILL_TEN_TIMES" not in os.environ, reason="two minutes: set TUNER_KILL_TEN_TIMES=1"
)
@pytest.mark.parametrize("searcher", ["guided", "tpe", "optuna.samplers:NSGAIISampler"])
def test_killed_ten_times_it_ends_as_if_undisturbed(tmp_path_factory, searcher):
    check(tmp_path_factory.mktemp("k"), kills=10, searcher=searcher)
