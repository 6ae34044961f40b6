"""How many trials of each kind a cluster can run at once, as its nodes come and go."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ray

from tuner.core.errors import UnavailableError
from tuner.searches.ray.local_ray import require_alive

Resources = Mapping[str, float]

REFRESH_S = 1.0
"""Ray knows of a node that came or went within about a second; asking takes 5 us a node."""

NODE_RESOURCES = ("node:", "memory", "object_store_memory", "accelerator_type:")
"""What says nothing of what a node can run, by the beginnings of the names."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long a search waits for a worker that can run its trials, in seconds.

    `at_first_s` where there has been none, `later_s` where there was one and it is gone.
    """

    at_first_s: float
    later_s: float


OWN_CLUSTER = Waiting(at_first_s=0.0, later_s=0.0)
"""Nothing comes to it."""
FIXED_CLUSTER = Waiting(at_first_s=0.0, later_s=300.0)
"""Nobody starts nodes there; but who restarts a node, or its network, needs some minutes."""
GROWING_CLUSTER = Waiting(at_first_s=1800.0, later_s=1800.0)
"""A machine with a GPU, its image and the libraries may take a quarter of an hour to come."""


class Capacity:
    """The room for trials, by what they need.

    `nodes` gives the resources of each node that is alive; it is asked once in `REFRESH_S`.
    """

    def __init__(
        self,
        nodes: Callable[[], Sequence[Resources]] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = nodes or alive_nodes
        self._clock = clock
        self._nodes: Sequence[Resources] = ()
        self._asked_s = -math.inf

    def capacity(self, resources: Resources) -> int:
        """How many trials with these resources all nodes together can run at once."""
        self._refresh()
        return sum(fits_on(node, resources) for node in self._nodes)

    def missing(
        self, resources: Resources, *, waited_s: float, was_there: bool
    ) -> UnavailableError:
        """The answer where no node can run a trial with these resources."""
        return no_node(self._nodes, resources, waited_s=waited_s, was_there=was_there)

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._asked_s >= REFRESH_S:
            self._nodes, self._asked_s = self._ask(), now_s


def alive_nodes() -> list[Resources]:
    """The total resources of each node that Ray takes for alive.

    Raises `RayLostError` where a process of Ray's on this machine is lost: asking would block.
    """
    require_alive()
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def fits_on(node: Resources, resources: Resources) -> int:
    """How many trials with these resources one node can run at once."""
    shares = [node.get(name, 0.0) / need for name, need in resources.items() if need]
    return math.floor(min(shares, default=1.0))


def no_node(
    nodes: Sequence[Resources], resources: Resources, *, waited_s: float, was_there: bool = False
) -> UnavailableError:
    """The answer where no node can run a trial: what is missing, and what there is."""
    wanted = listed(resources)
    missing = [
        name
        for name, need in resources.items()
        if need and max((node.get(name, 0.0) for node in nodes), default=0.0) < need
    ]
    offered = sorted({name for node in nodes for name in of_interest(node)})
    what = (
        f"no node of the cluster {'has' if not was_there else 'is left that has'} "
        + (f"{listed({n: resources[n] for n in missing})}" if missing else f"all of {wanted}")
        + (f", after {waited_s:.0f} s" if waited_s else "")
    )
    there = f"its nodes offer {', '.join(offered)}" if offered else "it has no node for trials"
    return UnavailableError(
        f"{what}: a trial needs {wanted}, and {there}",
        hint="`tuner node-resources` on each GPU node prints the resources to start it with (`ray "
        "start --address HOST:PORT --resources ...`); a cluster that grows needs a node type with "
        "them",
    )


def of_interest(node: Resources) -> list[str]:
    """The names of the resources that say what a node can do."""
    return [
        name
        for name, amount in node.items()
        if amount and not name.startswith(NODE_RESOURCES) and "_group_" not in name
    ]


def listed(resources: Resources) -> str:
    """Resources as people write them: "1 a6000, 1 CPU"."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount)
