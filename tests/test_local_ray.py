"""Ray's own processes: lost ones, and what others of this machine reach of them."""

import os
import sys

import pytest
from started import run_python

PROGRAM = """
import os, signal, sys
import psutil
from tune_fakes import GPU, FakeFactory, FakeSpace, request_of
from tuner.core.errors import UnavailableError
from tuner.searches.ray.driver import search

ended = []

def on_record(record):
    ended.append(record)
    if len(ended) == 2:
        for child in psutil.Process().children(recursive=True):
            if sys.argv[1] in child.name():
                os.kill(child.pid, signal.SIGKILL)
                return

try:
    search(request_of(space=FakeSpace(), gpu=GPU, runner_factory=FakeFactory(sleep_s=2.0),
                         trials=40, searcher="random", workers=1), on_record=on_record)
except UnavailableError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        ("raylet", 3, "lost during the search: its raylet has ended"),
        # Without its control store, Ray ends the process itself, after a minute.
        ("gcs_server", 1, "GCS may have been killed"),
    ],
)
def test_a_search_that_loses_ray_ends_and_says_so(kind, code, text):
    done = run_python(
        "-c",
        PROGRAM,
        kind,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=600,
    )
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


FOLDERS = """
import os, stat
from pathlib import Path
import ray
from tuner.searches.joining import default_path
from tuner.searches.options import SearchOptions
from tuner.searches.ray import cluster

with cluster.quiet(), cluster.connected(SearchOptions(), cpus=1):
    socket = Path(ray.nodes()[0]["RayletSocketName"])
    session = socket.parents[1]
    print([oct(stat.S_IMODE(path.stat().st_mode)) for path in session.parents[:2]])
    print(oct(stat.S_IMODE(default_path().stat().st_mode)))
print(session.parents[1].exists())
"""


@pytest.mark.proof
def test_other_users_reach_neither_the_folder_nor_the_token_of_an_own_ray(tmp_path):
    """Ray itself makes its folder for all to write into, and the token for all to read."""
    home = {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    known = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
    ran = run_python("-c", FOLDERS, env={**known, **home}, umask=0)
    assert ran.stdout.splitlines() == ["['0o777', '0o700']", "0o600", "False"], ran.stderr
