"""Searches on Ray clusters that nobody prepared for tuner: plain `ray start`, emulated GPUs.

    python -m benchmarks.cluster [--gpu a6000] [CASE ...]

Prints a row for each case. Needs a CUDA build of PyTorch and Ray, no GPU. Each cluster has a head
node without a GPU and a worker with an emulated one; only its own processes are ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.emulator.session import Session
from tuner.space.gpus import get_gpu

ROOT = Path(__file__).parents[1]
LIMIT_S = 900.0
STARTS = 6
"""Attempts to start a node: Ray gives itself 30 s, which a busy machine exceeds."""

MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
SPACE = """\
name: small
workload: causal_lm
model: ./model
knobs:
  micro_batch: [1, 2, 4]
  gradient_checkpointing: [true, false]
fixed: {effective_batch: 4, lora_rank: 4, max_length: 32, precision: bf16}
derived: {grad_accum: effective_batch // micro_batch}
"""

DEFAULT, OWN, NONE = "default labels", "own labels", "no labels"
KILLED, WRONG = "a killed trial", "another GPU"


@dataclass(frozen=True, slots=True)
class Case:
    """One cluster: options of its worker's `ray start` and of `tuner search`."""

    start: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    kills: bool = False
    has: str = ""
    """The GPU type of the worker; by default the searched one."""


CASES = {
    DEFAULT: Case(),
    # Ray's own label says nothing here, as where an administrator keeps other names.
    OWN: Case(("--labels=ray.io/accelerator-type=pool-7,team=vision",), ("--label", "team=vision")),
    NONE: Case(("--labels=ray.io/accelerator-type=unknown",)),
    KILLED: Case(kills=True),
    WRONG: Case(has="l4"),
}


def free_ports(number: int) -> list[int]:
    """Ports that are free now, below those that the system gives out by itself."""
    found: list[int] = []
    while len(found) < number:
        port = random.randrange(20_000, 32_000)  # noqa: S311 - no secret
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            found.append(port)
    return found


class Cluster:
    """Processes of `ray start`, and their folder."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tc-", dir="/tmp"))
        self.port, self.dashboard, self.client = free_ports(3)
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "a-token-of-the-benchmark-0123456789",
        }
        self.address = ""
        self.nodes: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str, environment: Mapping[str, str] | None = None) -> None:
        """Start a node and wait until it answers; again if a busy machine is too slow for Ray."""
        for _ in range(STARTS):
            self.nodes.append(self._started(options, environment or {}))
            log = self.log(len(self.nodes) - 1)
            while self.nodes[-1].poll() is None:
                if "Ray runtime started" in log.read_text(errors="replace"):
                    return
                time.sleep(0.1)
            end(self.nodes[-1])
        raise RuntimeError(f"a node did not start: {log.read_text(errors='replace')}")

    def log(self, number: int) -> Path:
        """What a node said."""
        return self.folder / f"node-{number}.log"

    def _started(
        self, options: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        (agent,) = free_ports(1)
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1",
            f"--dashboard-agent-listen-port={agent}", "--object-store-memory=80000000",
            "--min-worker-port=0", "--max-worker-port=0", *options,
        ]  # fmt: skip
        with self.log(len(self.nodes)).open("wb") as output:
            return subprocess.Popen(
                command,
                env={**self.environment, **environment},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def close(self) -> None:
        """End every process of the nodes, and remove their files."""
        for node in reversed(self.nodes):
            end(node)
        shutil.rmtree(self.folder, ignore_errors=True)


def end(node: subprocess.Popen[bytes]) -> None:
    """End the processes of a node."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(15)


@contextlib.contextmanager
def running(case: Case, gpu: str) -> Iterator[Cluster]:
    """A cluster for a case."""
    cluster = Cluster()
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.close)
        session = Session(get_gpu(case.has or gpu), count=1)
        stack.callback(session.close)
        cluster.start(
            "--head", f"--port={cluster.port}", f"--dashboard-port={cluster.dashboard}",
            f"--ray-client-server-port={cluster.client}", "--num-gpus=0",
            f"--temp-dir={cluster.folder / 'ray'}",
        )  # fmt: skip
        said = cluster.log(len(cluster.nodes) - 1).read_text(errors="replace")
        cluster.address = said.split("--address='")[1].split("'")[0]
        emulated = session.environment({"CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": str(ROOT)})
        cluster.start(f"--address={cluster.address}", *case.start, environment=emulated)
        yield cluster


def trial_processes() -> list[int]:
    """The processes in which trials of this program's clusters train."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            fork = (path / "stat").read_text().rpartition(")")[2].split()[1]
            parent = (Path("/proc") / fork / "cmdline").read_bytes().split(b"\0")
            if words == parent and any(b"tuner.trial.warm" in word for word in words):
                found.append(int(path.name))
    return found


def searched(case: Case, gpu: str) -> tuple[int, float, str, list[dict[str, object]]]:
    """The exit code, seconds, output and records of a search on the cluster of a case."""
    with running(case, gpu) as cluster:
        work = cluster.folder / "work"
        (work / "model").mkdir(parents=True)
        (work / "model" / "config.json").write_text(json.dumps(MODEL))
        (work / "small.yaml").write_text(SPACE)
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tuner", "search", "--space", "small.yaml", "--gpu", gpu,
             "--address", cluster.address, "--trials", "3", "--budget", "0.2s", "--no-verify",
             *case.search],
            cwd=work, env=cluster.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        killed = False
        while case.kills and not killed and process.poll() is None:
            for pid in trial_processes()[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed = True
            time.sleep(0.02)
        out, _ = process.communicate(timeout=LIMIT_S)
        took_s = time.monotonic() - began
        journals = work.glob("results/*/*/trials.jsonl")
        lines = [line for journal in journals for line in journal.read_text().splitlines()]
        return process.returncode, took_s, out, [json.loads(line) for line in lines]


def main() -> int:
    """Print what came of each case; 1 if one did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="a6000")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    given = parser.parse_args()
    failed = 0
    for name in given.cases:
        case = CASES[name]
        code, took_s, out, records = searched(case, given.gpu)
        ran = sum(record.get("status") == "ok" for record in records)
        nodes = sorted({str(record.get("node")) for record in records})
        right = (code, ran) == ((3, 0) if case.has else (0, 3))
        right = right and (not case.kills or "tried again" in out)
        failed += not right
        print(f"{name}: exit {code}, {ran} trials ran on {', '.join(nodes) or '-'}, {took_s:.0f} s")
        if given.verbose or not right:
            print(out)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
