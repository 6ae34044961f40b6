"""A search that is killed at random moments and started again ends as if nothing had happened."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass

import pytest
from shared_cases import kill_points


@dataclass(frozen=True, slots=True)
class Calm:
    """The search that nobody kills, and what it found."""

    search: kill_points.Search
    found: kill_points.Undisturbed


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Calm:
    search = kill_points.Search(tmp_path_factory.mktemp("k") / "calm")
    return Calm(search, kill_points.undisturbed(search))


@pytest.mark.proof
def test_the_command_killed_in_its_trials_ends_as_one_that_was_not(tmp_path_factory, calm):
    trials = kill_points.TRIALS
    broken = kill_points.Search(tmp_path_factory.mktemp("k") / "broken")
    process = broken.start()
    until = time.monotonic() + 1200
    wanted = random.Random(7).randrange(1, trials - 1)
    while broken.ended() < wanted and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 1 <= broken.ended() < trials
    assert broken.start().wait(1200) == 0, broken.said()
    assert broken.ended() == calm.search.ended() == trials
    point = kill_points.Point("driver")
    kill_points.compare(broken, calm.found, point)
    assert point.problems == []


@pytest.mark.proof
def test_a_search_whose_worker_is_killed_ends_as_one_that_was_left_alone(tmp_path_factory, calm):
    """Ray's own losses are in test_local_ray."""
    broken = kill_points.Search(tmp_path_factory.mktemp("k") / "broken")
    point = kill_points.run_point(broken, "worker", random.Random(2), calm.found)
    assert point.problems == []
    assert point.exit_code == 0
