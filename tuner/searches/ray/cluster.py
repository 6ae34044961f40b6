"""Ray itself: a quiet private cluster for one search, or a connection to an existing one.

Its nodes are asked for their GPUs, surveyed, and demanded of its autoscaler.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import ray
from ray.exceptions import AuthenticationError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tuner.core.environment import DEVICE_ORDER
from tuner.core.errors import UnavailableError
from tuner.core.files import scratch_folder
from tuner.core.host import usable_cpus
from tuner.core.meanwhile import environment
from tuner.searches.joining import checked_address, keep_private, no_token, not_joined
from tuner.searches.nodes import ACCELERATOR, ACCELERATOR_RESOURCE, Need, Node, Nodes
from tuner.searches.options import SearchOptions
from tuner.space.gpus import accelerator_names
from tuner.trial.factories import Facts, look

OBJECT_STORE_BYTES = 100_000_000
"""Size of Ray's object store. Trials exchange a few kilobytes, and Ray's default is 30 % of the
host's memory."""

STARTS = 3
"""Number of attempts to start Ray, which gives itself 30 s: a machine that is too busy is often
free a minute later. The last one is without the dashboard."""

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

LOCALHOST = "127.0.0.1"

Tell = Callable[[str], None]

METRICS_PERIOD_MS = "2000"
"""Period at which processes of a private cluster report metrics; Ray's default is 10 s."""

QUIET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A trial that exhausts the host's memory ends by itself; Ray would kill its supervisor.
    "RAY_memory_monitor_refresh_ms": "0",
    **DEVICE_ORDER,
}


class _OwnOutput:
    """Standard output without the pages that Ray's threads print about lost nodes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, unless a thread of Ray does."""
        if threading.current_thread().name.startswith("ray_"):
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Ray from printing and from usage statistics inside the block."""
    with environment(QUIET_ENVIRONMENT), contextlib.redirect_stdout(_OwnOutput(sys.stdout)):
        yield


@contextlib.contextmanager
def connected(
    options: SearchOptions,
    *,
    cpus: int = 1,
    gpus: Sequence[int] = (),
    undisturbed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    tell: Tell = lambda line: None,
) -> Iterator[None]:
    """Initialise Ray for the block, with the metrics and dashboard that `options` ask for.

    Uses the connection of this process if there is one; else joins the cluster at their address;
    else starts a cluster with `cpus` CPUs and the GPUs of these indices, and at the end stops all
    its processes and removes its files. Ray starts and stops within `undisturbed()`. `tell` is
    called with a line for each address to look at. Raises `UnavailableError` if there is no cluster
    at the address or Ray does not start in time, and `InputError` for an invalid address.
    """
    if ray.is_initialized():
        yield
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        stack.callback(_shut_down, undisturbed)
        # Ray's workers import from the current folder before all others; this one is empty.
        with undisturbed(), contextlib.chdir(folder):
            if options.address is None:
                url = _started(folder, cpus, gpus, options, tell)
            else:
                url = _join(options.address)
        # Tell the addresses of the dashboard and the metrics of the connected cluster.
        if options.dashboard and url:
            has_token = os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"
            token = " (`ray get-auth-token` prints the token that it asks for)" if has_token else ""
            tell(f"dashboard: http://{url}{token}")
        if options.metrics:
            (node,) = ray.nodes()
            host, port = node["NodeManagerAddress"], node["MetricsExportPort"]
            tell(f"metrics: http://{host}:{port}/metrics")
        yield


def cpus_for(workers: int | None, resources_per_trial: Mapping[str, float]) -> int:
    """CPUs of a new cluster: those that concurrent trials need, else those of this process."""
    if workers is not None:
        return max(1, math.ceil(workers * resources_per_trial.get("CPU", 1.0)))
    return usable_cpus()


def _started(
    folder: Path, cpus: int, gpus: Sequence[int], options: SearchOptions, tell: Tell
) -> str:
    """Start a cluster as `_start` does: again if that fails, and at last without its dashboard."""
    for left in reversed(range(STARTS)):
        try:
            return _start(folder, cpus, gpus, options, tell)
        except UnavailableError:
            raise
        except Exception as error:
            ray.shutdown()
            said = str(error).strip().splitlines()[0]
            if not left:
                raise UnavailableError(
                    f"Ray did not start on this machine, {STARTS} times: {said}",
                    hint="the machine is likely overloaded or short of memory: try again with "
                    "fewer --workers or when it is less busy; --address uses a running cluster",
                ) from error
            if options.dashboard and left == 1:
                tell(f"warning: no dashboard: {said}")
                options = replace(options, dashboard=False)
    raise AssertionError  # unreachable: the last attempt returns or raises


def _start(folder: Path, cpus: int, gpus: Sequence[int], options: SearchOptions, tell: Tell) -> str:
    """Start a cluster on this machine; return the address of its dashboard, or ""."""
    if said := keep_private():
        tell(said)
    own = {
        # Ray makes its folder writable for all users, so it is inside a private folder.
        "RAY_TMPDIR": str(folder),
        # Collecting metrics takes processor time from trials.
        "RAY_enable_metrics_collection": str(int(options.metrics or options.dashboard)),
        "RAY_metrics_report_interval_ms": METRICS_PERIOD_MS,
        **_visible(gpus),
    }
    with environment(own):
        context = ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=len(gpus),
            include_dashboard=options.dashboard,
            dashboard_host=LOCALHOST,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    return str(context.dashboard_url or "")


def _visible(gpus: Sequence[int]) -> dict[str, str]:
    """The variable that shows processes only these GPUs, indexed among those of this process."""
    if not gpus:
        return {}
    before = os.environ.get(VISIBLE_DEVICES)
    seen = before.split(",") if before else None
    return {VISIBLE_DEVICES: ",".join(seen[index] if seen else str(index) for index in gpus)}


def _shut_down(undisturbed: Callable[[], AbstractContextManager[None]]) -> None:
    with undisturbed():
        ray.shutdown()


def _join(address: str) -> str:
    """Join the cluster; return the address of its dashboard, or ""."""
    wanted = checked_address(address)
    try:
        context = ray.init(address=wanted, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError as error:
        raise no_token(wanted) from error
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        ray.shutdown()
        raise not_joined(wanted, str(error).strip().splitlines()[0]) from error
    return str(context.dashboard_url or "")


ASK_WITHIN_S = 60.0
"""Time for all nodes to say what they have: each has to start a process for it."""
LOOK_S = 0.05
ASKED_GPU = 0.001
"""Part of a GPU that the question takes, so that Ray shows the GPU that it would give a trial."""


def nodes_of_ray() -> Nodes:
    """The nodes of the cluster that this process is connected to."""
    return Nodes(alive_nodes, ask)


def alive_nodes() -> list[Node]:
    """The nodes that Ray considers alive."""
    return [
        Node(n["NodeID"], n["NodeManagerHostname"] or n["NodeName"], n["Resources"], n["Labels"])
        for n in ray.nodes()
        if n["Alive"]
    ]


def ask(node: Node, need: Need) -> Future[Facts]:
    """Ask a node for its facts."""
    question = ray.remote(look).options(
        name="which GPU?",
        num_cpus=0,
        num_gpus=ASKED_GPU if need.resources.get("GPU") else 0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
    ).remote(need.identify)  # fmt: skip
    answer: Future[Facts] = question.future()
    return answer


def options_of(need: Need) -> dict[str, Any]:
    """A need as Ray's options of an actor."""
    named = ("CPU", "GPU", "memory")
    custom = {name: amount for name, amount in need.resources.items() if name not in named}
    return {
        "num_cpus": need.resources.get("CPU", 0),
        "num_gpus": need.resources.get("GPU", 0),
        "memory": need.resources.get("memory"),
        "resources": custom or None,
    }


@dataclass(frozen=True, slots=True)
class _Survey:
    """The needs that a cluster can meet, now or when its GPUs are free, and what it has.

    `grows` is True if it starts nodes on demand, `emulated` if its GPUs are emulated ones, and
    `missing` is the error where it meets no need.
    """

    met: tuple[Need, ...]
    grows: bool
    emulated: bool
    missing: UnavailableError


def survey(address: str, needs: Sequence[Need]) -> _Survey:
    """Look what the cluster at `address` has for any of the needs.

    Raises `UnavailableError` if there is no cluster, and `InputError` for an invalid address.
    """
    nodes = nodes_of_ray()
    with quiet(), connected(SearchOptions(address=address)):
        until_s = time.monotonic() + ASK_WITHIN_S
        nodes.refresh(wait=True)
        while True in [nodes.asked(need) for need in needs] and time.monotonic() < until_s:
            time.sleep(LOOK_S)
            nodes.refresh()
        met = tuple(need for need in needs if nodes.usable(need) or nodes.asked(need))
        return _Survey(met, nodes.grows(), nodes.emulated, nodes.missing(needs[0]))


FORM_S = 20.0
"""A demand is shown in one form for this time: a node that it starts counts for the next form."""


class PlaceholderDemand:
    """Keeps placement groups waiting for missing resources, so that the autoscaler adds nodes.

    A node type may name its GPU by a resource of tuner's, by Ray's resource or by a label. The
    forms take turns, because one node answers only one at a time. They end with the connection.
    """

    def __init__(self) -> None:
        self._groups: dict[int, tuple[int, list[PlacementGroup]]] = {}

    def show(self, key: int, need: Need, count: int) -> None:
        """Wait for the need on `count` nodes, 0 or more; placed groups are removed at once."""
        forms = _forms(need)
        turn = int(time.monotonic() // FORM_S) % len(forms)
        before, groups = self._groups.get(key, (turn, []))
        waiting = []
        if before == turn:
            state = ray.util.placement_group_table
            waiting = [g for g in groups if state(g).get("state") != "CREATED"]
        for group in groups:
            if group not in waiting[:count]:
                ray.util.remove_placement_group(group)
        resources, labels = forms[turn]
        added = [
            ray.util.placement_group([resources], bundle_label_selector=[labels])
            for _ in range(count - len(waiting))
        ]
        self._groups[key] = turn, waiting[:count] + added


def _forms(need: Need) -> list[tuple[dict[str, float], dict[str, str]]]:
    resources = dict(need.resources)
    if need.labels or need.gpu is None:
        return [(resources, dict(need.labels))]
    names = accelerator_names(need.gpu)
    any_of = {ACCELERATOR: f"in({','.join(names)})"}
    by_type = {f"{ACCELERATOR_RESOURCE}{names[0]}": 0.001}
    return [
        ({**resources, need.gpu.id: resources["GPU"]}, {}),
        ({**resources, **by_type}, {}),
        (resources, any_of),
    ]
