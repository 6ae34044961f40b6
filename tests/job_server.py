"""A real Ray cluster with a job server on this machine, for tests; nothing of it is shared.

Never `ray stop`: that would end the clusters of others on the same machine.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 180

TOKEN = "a-token-of-the-tests-0123456789"
"""Of every cluster that tests start: Ray reads its token once in a process, and keeps it."""


@dataclass(frozen=True, slots=True)
class JobCluster:
    """Where a cluster answers, and where it logs."""

    url: str
    gcs_address: str
    log: Path


def free_ports(number: int) -> list[int]:
    """Ports that were free a moment ago, below those that the system gives out by itself."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < number:
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            found.append(taken.getsockname()[1])
    return found


@contextlib.contextmanager
def job_cluster(
    folder: Path,
    environment: Mapping[str, str],
    arguments: Callable[[str], Sequence[str]] = lambda gcs_address: ["--num-cpus=2"],
) -> Iterator[JobCluster]:
    """A head node with a job server, until the block ends.

    `folder` is for its log; `environment` is added to that of this process; `arguments` returns
    more options of `ray start`, from the cluster's own address.
    """
    gcs, dashboard, agent, agent_grpc, client, metrics = free_ports(6)
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "tuner"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tuner "$@"\n')
    program.chmod(0o755)
    # Ray's sockets need a short path.
    scratch = Path(tempfile.mkdtemp(prefix="tj-", dir="/tmp"))
    cluster = JobCluster(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{gcs}", folder / "ray.log")
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        **environment,
    }
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        "--node-ip-address=127.0.0.1", f"--port={gcs}", "--include-dashboard=true",
        "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--ray-client-server-port={client}", f"--metrics-export-port={metrics}",
        "--object-store-memory=100000000", f"--temp-dir={scratch}",
        *arguments(cluster.gcs_address),
    ]  # fmt: skip
    with cluster.log.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True
        )
    try:
        _wait_until_it_answers(cluster, process)
        yield cluster
    finally:
        _end(process)
        shutil.rmtree(scratch, ignore_errors=True)


def _wait_until_it_answers(cluster: JobCluster, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, cluster.log.read_text()
        try:
            urllib.request.urlopen(f"{cluster.url}/api/version", timeout=10).close()
            return
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):  # it wants the token: it is there
                return
            time.sleep(0.2)
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no job server after {START_TIMEOUT_S} s:\n{cluster.log.read_text()}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the cluster and everything that it has started."""
    try:
        parent = psutil.Process(process.pid)
        everything = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        everything = []
    for each in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.terminate()
    _, left = psutil.wait_procs(everything, timeout=5)
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(left, timeout=10)
    process.wait()
