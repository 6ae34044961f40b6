"""Trials whose truth is known, on a Ray cluster of several nodes whose GPUs are only numbers.

The processes are real ones: a raylet for each node, one control store, workers. Nobody else's
cluster is found or disturbed: its files lie in a folder of their own. A node's GPU is what its
environment says, so that a node can have another one than its resource is named after, and lose it
while trials run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tune_fakes import FakeSpace, closed_form

from tuner.core.meanwhile import environment
from tuner.core.nvml import DeviceIdentity
from tuner.core.records import Configuration, Outcome, Source, Speed, Status, TrialRecord
from tuner.core.units import GIB
from tuner.searches.front import pareto_front
from tuner.searches.journal import JournalWriter, read_journal
from tuner.searches.options import SearchOptions
from tuner.searches.progress import StoppedBy
from tuner.searches.ray.driver import search_all
from tuner.searches.request import SearchOutcome, SearchRequest
from tuner.space.gpus import Gpu, get_gpu
from tuner.trial.base import PLAIN, Instructions
from tuner.trial.factories import VerifiedFactory

DEVICE = "TUNER_CHAOS_DEVICE"
"""Environment variable of a node: the id of the GPU type that it really has."""
LOST = "TUNER_CHAOS_LOST"
"""Environment variable of a node: a file; once it exists, the node's GPU has fallen off the bus."""
NODE = "TUNER_CHAOS_NODE"
"""Environment variable of a node: its name."""
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

SPACE = FakeSpace(
    name="chaos",
    values={
        "micro_batch": (1, 2, 4, 8, 16, 32),
        "lora_rank": (16, 128),
        "gradient_checkpointing": (True, False),
        "precision": ("nf4",),
    },
)


# --- trials ----------------------------------------------------------------------------------


def outcome_of(configuration: Configuration, gpu: Gpu) -> Outcome:
    """What a trial comes to. The larger the GPU, the more of the space fits."""
    batch, rank = configuration["micro_batch"], configuration["lora_rank"]
    saves = configuration["gradient_checkpointing"]
    total = int(GIB * (9 + (0.5 if saves else 2.5) * batch + rank / 64))
    rate = 10 * batch / (batch + 4) * (0.75 if saves else 1.0) - rank / 200
    speed = Speed(
        step_s=32 / rate, it_per_s=rate / 32, samples_per_s=rate, tokens_per_s=512 * rate, mfu=None
    )
    return closed_form(total, speed, gpu)


@dataclass(frozen=True)
class ChaosFactory:
    """Makes the runner of one GPU type; picklable.

    Each trial that begins leaves a file in `folder`/log, named after its node and process. From the
    trial number `held_from` of a type on, each waits until the file `gate_of` exists.
    """

    gpu_id: str
    folder: Path
    sleep_s: float
    held_from: int

    def __call__(self) -> ChaosRunner:
        return ChaosRunner(self)


@dataclass
class ChaosRunner:
    """Runs trials by their closed form."""

    factory: ChaosFactory
    source: Source = Source.PREDICTED

    def run(self, configuration: Configuration, instructions: Instructions = PLAIN) -> Outcome:
        """Raises what NVML raises where the GPU is gone."""
        made = self.factory
        log, gate = made.folder / "log", gate_of(made.folder, made.gpu_id)
        name = f"{made.gpu_id}-{os.environ[NODE]}-{os.getpid()}-{time.time_ns()}"
        (log / name).write_text(configuration.key)
        time.sleep(made.sleep_s)
        if len(list(log.glob(f"{made.gpu_id}-*"))) >= made.held_from:
            while not gate.exists():
                time.sleep(0.02)
        if Path(os.environ[LOST]).exists():
            import pynvml

            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return outcome_of(configuration, get_gpu(made.gpu_id))


def gate_of(folder: Path, gpu_id: str) -> Path:
    return folder / f"{gpu_id}-go-on"


def device_here() -> DeviceIdentity | None:
    """What NVML would say of the GPU of this node."""
    if DEVICE not in os.environ:
        return None
    gpu = get_gpu(os.environ[DEVICE])
    return DeviceIdentity(gpu.device_names[0], gpu.memory_bytes, (8, 6), "570.0")


# --- nodes -----------------------------------------------------------------------------------


@dataclass
class ChaosNode:
    """One node of the cluster."""

    name: str
    ray_node: Any
    lost_file: Path

    def signal(self, number: int) -> None:
        """To its raylet: killed, its workers end themselves; stopped, it is silent, they go on."""
        os.kill(self.ray_node.all_processes["raylet"][0].process.pid, number)


class ChaosCluster:
    """The nodes; made by `chaos_cluster`."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.nodes: list[ChaosNode] = []

    def add(self, gpu_id: str, *, device: str | None = None) -> ChaosNode:
        """A node that offers the resource `gpu_id` and has a GPU of the type `device`."""
        name = f"{gpu_id}.{len(self.nodes)}"
        lost = self.folder / f"{name}-lost"
        ray_node = self.cluster.add_node(
            num_cpus=1,
            num_gpus=1,
            resources={gpu_id: 1},
            object_store_memory=OBJECT_STORE_BYTES,
            env_vars={DEVICE: device or gpu_id, LOST: str(lost), NODE: name},
        )
        self.nodes.append(ChaosNode(name, ray_node, lost))
        return self.nodes[-1]

    def remove(self, node: ChaosNode) -> None:
        """End it as `ray stop` does."""
        self.cluster.remove_node(node.ray_node)

    def wait_until_dead(self, node: ChaosNode) -> None:
        """Wait until Ray takes the node for dead."""
        deadline_s = time.monotonic() + 300
        while node.ray_node.node_id in self.cluster.global_state._live_node_ids():
            assert time.monotonic() < deadline_s, f"{node.name} is still taken for alive"
            time.sleep(0.1)

    def close(self) -> None:
        """End every process, of frozen nodes too."""
        for node in self.nodes:
            if node.ray_node not in self.cluster.worker_nodes:
                continue  # was removed
            with contextlib.suppress(ProcessLookupError):
                node.signal(signal.SIGCONT)
            node.ray_node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        self.cluster.worker_nodes.clear()
        self.cluster.shutdown()


@contextlib.contextmanager
def chaos_cluster() -> Iterator[ChaosCluster]:
    """A cluster with a head node that runs no trials; all its processes end on leaving."""
    import pytest
    from ray.cluster_utils import Cluster

    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    with environment({**QUIET, "PYTHONPATH": path}), contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # Ray would note the address where every `address="auto"` of this machine looks.
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("ray._private.utils.write_ray_address", lambda *args, **named: None)
        patch.setattr("ray._common.utils.reset_ray_address", lambda *args, **named: None)
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


# --- searches --------------------------------------------------------------------------------


class Journals:
    """One journal for each GPU type, and who waits for their records."""

    def __init__(self, folder: Path, gpu_ids: Sequence[str]) -> None:
        self.folder, self.gpu_ids = folder, gpu_ids
        (folder / "log").mkdir()

    def path(self, gpu_id: str) -> Path:
        return self.folder / gpu_id / "trials.jsonl"

    def wait_for(self, gpu_id: str, at_least: int) -> None:
        """Wait for so many records. All journals are valid then."""
        until = time.monotonic() + 300
        while len(self.records(gpu_id)) < at_least:
            assert time.monotonic() < until, f"{gpu_id}: fewer than {at_least} records"
            time.sleep(0.05)
        for other in self.gpu_ids:
            self.records(other)

    def records(self, gpu_id: str) -> tuple[TrialRecord, ...]:
        """The records of a journal in which no line is torn and nothing stands twice."""
        found = read_journal(self.path(gpu_id))
        assert not found.notes, found.notes
        for name in ("trial_id", "configuration"):
            often = Counter(getattr(record, name) for record in found.records)
            assert not often or max(often.values()) == 1, f"{gpu_id}: {often.most_common(1)}"
        return found.records

    def search(self, address: str, *, held_from: int) -> tuple[SearchOutcome, ...]:
        """Search the whole space for each GPU type."""
        with contextlib.ExitStack() as stack:
            writers = {
                gpu_id: stack.enter_context(JournalWriter(self.path(gpu_id)))
                for gpu_id in self.gpu_ids
            }
            return search_all(
                [self._request(gpu_id, address, held_from) for gpu_id in self.gpu_ids],
                on_record=lambda record: writers[record.gpu].append(record),
            )

    def _request(self, gpu_id: str, address: str, held_from: int) -> SearchRequest:
        gpu = get_gpu(gpu_id)
        factory = ChaosFactory(gpu_id, self.folder, 0.05, held_from)
        return SearchRequest(
            space=SPACE,
            gpu=gpu,
            runner_factory=VerifiedFactory(
                factory, gpu.device_names, (gpu.memory_bytes,), identify=device_here
            ),
            options=SearchOptions(searcher="random", trials=1000, address=address, verify=False),
            versions={"tuner": "chaos"},
            resources_per_trial={"GPU": 1, "CPU": 1},
        )

    def check_end(self, results: Sequence[SearchOutcome]) -> None:
        """Each search tried its whole space, each configuration once, and found the true front."""
        everything = list(SPACE.configurations())
        for gpu_id, result in zip(self.gpu_ids, results, strict=True):
            assert result.failure is None, result.failure
            assert result.stopped_by is StoppedBy.EXHAUSTED
            records = self.records(gpu_id)
            assert [r.trial_id for r in records] == [r.trial_id for r in result.records]
            assert {r.configuration.key for r in records} == {c.key for c in everything}
            assert {record.gpu for record in records} == {gpu_id}
            assert not [r.outcome.message for r in records if r.outcome.status is Status.CRASHED]
            gpu, (first, *_) = get_gpu(gpu_id), records
            truth = [
                dataclasses.replace(first, configuration=c, outcome=outcome_of(c, gpu))
                for c in everything
            ]
            assert front_of(records) == front_of(truth)
            with JournalWriter(self.path(gpu_id)):  # nobody holds its lock
                pass

    def begun(self, gpu_id: str) -> list[str]:
        """The names of the nodes on which trials began, once for each."""
        notes = (self.folder / "log").glob(f"{gpu_id}-*")
        return [note.name.removeprefix(f"{gpu_id}-").split("-")[0] for note in notes]


def front_of(records: Sequence[TrialRecord]) -> set[str]:
    return {record.configuration.key for record in pareto_front(records)}
