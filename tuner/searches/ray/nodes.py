"""The nodes of a Ray cluster: asked for their GPUs, surveyed, and demanded of its autoscaler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tuner.core.errors import UnavailableError
from tuner.searches.nodes import ACCELERATOR, ACCELERATOR_RESOURCE, Need, Node, Nodes
from tuner.searches.options import SearchOptions
from tuner.searches.ray.cluster import connected, quiet
from tuner.space.gpus import accelerator_names
from tuner.trial.factories import Facts, look

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
class Survey:
    """The needs that a cluster can meet, now or when its GPUs are free, and what it has.

    `grows` is True if it starts nodes on demand, `emulated` if its GPUs are emulated ones, and
    `missing` is the error where it meets no need.
    """

    met: tuple[Need, ...]
    grows: bool
    emulated: bool
    missing: UnavailableError


def survey(address: str, needs: Sequence[Need]) -> Survey:
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
        return Survey(met, nodes.grows(), nodes.emulated, nodes.missing(needs[0]))


FORM_S = 20.0
"""A demand is shown in one form for this time: a node that it starts counts for the next form."""


class PlaceholderDemand:
    """Keeps placement groups waiting for missing resources, so that the autoscaler adds nodes.

    A node type may name its GPU by a resource of tuner's, by Ray's resource or by a label. The
    forms take turns, because one node answers only one at a time. They end with the connection.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._groups: dict[int, tuple[int, list[PlacementGroup]]] = {}
        self._clock = clock

    def show(self, key: int, need: Need, count: int) -> None:
        """Wait for the need on `count` nodes, 0 or more; placed groups are removed at once."""
        forms = _forms(need)
        turn = int(self._clock() // FORM_S) % len(forms)
        before, groups = self._groups.get(key, (turn, []))
        waiting = [g for g in groups if not _is_placed(g)] if before == turn else []
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


def _is_placed(group: PlacementGroup) -> bool:
    return bool(ray.util.placement_group_table(group).get("state") == "CREATED")
