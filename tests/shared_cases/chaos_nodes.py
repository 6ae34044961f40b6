"""A Ray cluster of several nodes on one machine, each with a GPU that is only a number.

The processes are real ones: a raylet for each node, one control store, workers. Nobody else's
cluster is found or disturbed: its files lie in a folder of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared_cases.chaos_trials import DEVICE, LOST, NODE
from tuner.core.meanwhile import environment

OBJECT_STORE_BYTES = 80_000_000
"""About the least that Ray takes for a node."""

IMPATIENT = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2500,
    "health_check_failure_threshold": 4,
}
"""A silent node is dead after 12 seconds, one whose process is gone after 2, and not after 30 to 60
as by default. On a busy machine a node may well be silent for some seconds."""

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class ChaosNode:
    """One node of the cluster."""

    name: str
    gpu_id: str
    ray_node: Any
    lost_file: Path
    alive: bool = True

    @property
    def raylet_pid(self) -> int:
        """Process id of its raylet."""
        return int(self.ray_node.all_processes["raylet"][0].process.pid)

    def lose_gpu(self) -> None:
        """From now on its GPU has fallen off the bus."""
        self.lost_file.touch()


@dataclass
class ChaosCluster:
    """The nodes; made by `chaos_cluster`."""

    cluster: Any
    folder: Path
    nodes: list[ChaosNode] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def address(self) -> str:
        """HOST:PORT of its control store."""
        return str(self.cluster.address)

    def alive(self, gpu_id: str | None = None) -> list[ChaosNode]:
        """The nodes that were not ended, of one GPU type or of all."""
        return [n for n in self.nodes if n.alive and gpu_id in (None, n.gpu_id)]

    def add(self, gpu_id: str, *, device: str | None = None, gpus: int = 1) -> ChaosNode:
        """A node that offers the resource `gpu_id` and has GPUs of the type `device`."""
        name = f"{gpu_id}.{next(self._numbers)}"
        lost = self.folder / f"{name}-lost"
        ray_node = self.cluster.add_node(
            num_cpus=gpus,
            num_gpus=gpus,
            resources={gpu_id: gpus},
            object_store_memory=OBJECT_STORE_BYTES,
            env_vars={DEVICE: device or gpu_id, LOST: str(lost), NODE: name},
        )
        self.nodes.append(ChaosNode(name, gpu_id, ray_node, lost))
        return self.nodes[-1]

    def kill(self, node: ChaosNode) -> None:
        """SIGKILL its raylet: the node is gone, and its workers end themselves."""
        node.alive = False
        os.kill(node.raylet_pid, signal.SIGKILL)

    def freeze(self, node: ChaosNode) -> None:
        """SIGSTOP its raylet: it is silent, as behind a broken network; its workers go on."""
        node.alive = False
        os.kill(node.raylet_pid, signal.SIGSTOP)

    def remove(self, node: ChaosNode) -> None:
        """End it as `ray stop` does."""
        node.alive = False
        self.cluster.remove_node(node.ray_node)

    def lose_gpu(self, node: ChaosNode) -> None:
        """Its GPU falls off the bus; it is no node for trials any more, and stays."""
        node.alive = False
        node.lose_gpu()

    def repair(self) -> None:
        """Take out the nodes whose GPU is lost."""
        for node in self.nodes:
            if node.lost_file.exists() and node.ray_node in self.cluster.worker_nodes:
                self.remove(node)

    def wait_until_dead(self, node: ChaosNode, timeout_s: float = 300.0) -> None:
        """Wait until Ray takes the node for dead."""
        deadline_s = time.monotonic() + timeout_s
        while node.ray_node.node_id in self.cluster.global_state._live_node_ids():
            assert time.monotonic() < deadline_s, f"{node.name} is still taken for alive"
            time.sleep(0.1)

    def close(self) -> None:
        """End every process, of frozen nodes too."""
        for node in self.nodes:
            if node.ray_node not in self.cluster.worker_nodes:
                continue  # was removed
            with contextlib.suppress(ProcessLookupError):
                os.kill(node.raylet_pid, signal.SIGCONT)
            node.ray_node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        self.cluster.worker_nodes.clear()
        self.cluster.shutdown()


@contextlib.contextmanager
def chaos_cluster() -> Iterator[ChaosCluster]:
    """A cluster with a head node that runs no trials; all its processes end on leaving."""
    import ray._common.utils
    import ray._private.utils
    from ray.cluster_utils import Cluster

    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    with environment({**QUIET, "PYTHONPATH": path}), contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # Ray would note the address where every `address="auto"` of this machine looks.
        for module, name in (
            (ray._private.utils, "write_ray_address"),
            (ray._common.utils, "reset_ray_address"),
        ):
            stack.enter_context(_replaced(module, name, lambda *args, **named: None))
        cluster = Cluster()
        found = ChaosCluster(cluster, folder)
        stack.callback(found.close)
        cluster.add_node(
            num_cpus=0,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            temp_dir=str(folder),
            _system_config=IMPATIENT,
        )
        # Ray's own handlers for the end of this process can only be set in the main thread.
        cluster._shutdown_at_exit = False
        yield found


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
