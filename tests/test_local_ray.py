"""Ray's own processes: a start that takes too long, and processes that are lost, without a Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from ray._private import worker
from ray._private.node import Node
from ray.exceptions import RpcError

from tuner.core.errors import UnavailableError
from tuner.searches.ray.private import (
    RayLostError,
    losses_said,
    lost_process,
    require_alive,
    started,
)

TOO_SLOW = (
    Exception("The current node timed out during startup. This could happen because some of the"),
    RuntimeError("Timed out waiting for file /tmp/ray/session/gcs_server_port_8f: Not found"),
)


class Starts:
    """Raises what it is given, one after another, and then starts."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "an address"


@pytest.mark.parametrize("error", TOO_SLOW)
def test_a_start_that_takes_too_long_is_tried_once_more(error):
    start = Starts(error)
    assert (started(start), start.calls) == ("an address", 2)


@pytest.mark.parametrize("error", TOO_SLOW)
def test_twice_too_long_is_said_with_what_to_do(error):
    start = Starts(error, error)
    with pytest.raises(UnavailableError, match="did not start") as raised:
        started(start)
    assert start.calls == 2
    assert "--workers" in raised.value.hint
    assert str(error)[:40] in raised.value.message


class NodeOfTest(Node):
    """A node that comes up to no more than one process."""

    def __init__(self, ended: list[str]) -> None:
        self._ended = ended
        raise RuntimeError("Timed out waiting for file gcs_server_port")

    def kill_all_processes(
        self, check_alive: bool = True, allow_graceful: bool = False, wait: bool = False
    ) -> None:
        self._ended.append("killed")


def test_what_a_failed_start_left_is_ended():
    ended: list[str] = []
    with pytest.raises(UnavailableError):
        started(lambda: NodeOfTest(ended))
    assert ended == ["killed", "killed"]


class Entry:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process


class OwnNode:
    """A node of this process, of processes that sleep."""

    raylet_socket_name = "/nowhere"

    def __init__(self) -> None:
        self.all_processes = {
            kind: [Entry(subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1))]
            for kind in ("raylet", "gcs_server", "dashboard")
        }

    def end(self, kind: str) -> None:
        process = self.all_processes[kind][0].process
        process.kill()
        process.communicate()


class JoinedNode:
    def __init__(self, path: str) -> None:
        self.all_processes: dict[str, list[Entry]] = {}
        self.raylet_socket_name = path


@pytest.fixture
def own(monkeypatch):
    node = OwnNode()
    monkeypatch.setattr(worker, "_global_node", node)
    yield node
    for kind in node.all_processes:
        node.end(kind)


@pytest.mark.parametrize("kind", ["raylet", "gcs_server"])
def test_a_vital_process_of_an_own_cluster_is_missed(own, kind):
    require_alive()
    own.end("dashboard")
    require_alive()
    own.end(kind)
    assert lost_process() == kind
    with (
        pytest.raises(UnavailableError, match=f"process {kind} has ended") as raised,
        losses_said(),
    ):
        require_alive()
    assert "in the journal, and the same command goes on" in raised.value.hint
    assert not issubclass(RayLostError, Exception)  # Ray Tune would clean up, and hang


def test_the_raylet_of_a_joined_cluster_is_missed(monkeypatch, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("r") / "raylet")
    monkeypatch.setattr(worker, "_global_node", JoinedNode(path))
    assert lost_process() == "raylet"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(1)
        assert [lost_process() for _ in range(5)] == [None] * 5  # a full queue is slow, not gone
    assert lost_process() == "raylet"


@pytest.mark.parametrize("error", [RpcError("no GCS"), ConnectionError("refused")])
def test_what_ray_raises_of_itself_is_said_as_a_loss(error):
    with pytest.raises(UnavailableError, match="lost during the search"), losses_said():
        raise error


PROGRAM = """
import os, signal, sys
import psutil
from ray._private import worker
from tune_fakes import GPU, FakeFactory, FakeSpace
from tuner.core.errors import UnavailableError
from tuner.searches.ray.driver import search
from tuner.searches.request import SearchRequest

ended = []

def on_record(record):
    ended.append(record)
    if len(ended) == 2:
        kinds = worker._global_node.all_processes
        victim = kinds.get(sys.argv[1]) or [
            child for child in psutil.Process(kinds["raylet"][0].process.pid).children()
            if sys.argv[1] in child.name()
        ]
        os.kill(getattr(victim[0], "process", victim[0]).pid, signal.SIGKILL)

try:
    search(SearchRequest(space=FakeSpace(), gpu=GPU, runner_factory=FakeFactory(sleep_s=2.0),
                         trials=40, searcher="random", max_concurrent=1), on_record=on_record)
except UnavailableError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["gcs_server", "RuntimeEnv"])
def test_a_search_that_loses_ray_says_so_before_ray_ends_it(kind):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    said = done.stdout + done.stderr  # stderr where Ray did not return
    ended = "raylet" if kind == "RuntimeEnv" else kind  # which ends with its agents
    assert f"lost during the search: its process {ended} has ended" in said
    assert "Traceback" not in said


FOLDERS = """
import stat
from pathlib import Path
from tuner.searches.ray import cluster
from tuner.searches.ray.private import node_here
from tuner.searches.ray.cluster import default_path

with cluster.quiet(), cluster.connected(None, cpus=1):
    session = Path(node_here().get_session_dir_path())
    print([oct(stat.S_IMODE(path.stat().st_mode)) for path in session.parents[:2]])
    print(oct(stat.S_IMODE(default_path().stat().st_mode)))
print(session.parents[1].exists())
"""


@pytest.mark.proof
def test_other_users_reach_neither_the_folder_nor_the_token_of_an_own_ray(tmp_path):
    """Ray itself makes its folder for all to write into, and the token for all to read."""
    home = {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    known = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
    ran = subprocess.run(
        [sys.executable, "-c", FOLDERS],
        env={**known, **home}, capture_output=True, text=True, check=False, umask=0,
    )  # fmt: skip
    assert ran.stdout.splitlines() == ["['0o777', '0o700']", "0o600", "False"], ran.stderr
