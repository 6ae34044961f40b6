"""Room for trials on a cluster, and its distribution among concurrent searches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup

from tuner.core.errors import TunerError, UnavailableError
from tuner.core.records import Configuration
from tuner.searches.progress import StoppedBy
from tuner.searches.ray.private import require_alive
from tuner.searches.request import SearchRequest
from tuner.searches.state import SearchState

Resources = Mapping[str, float]

REFRESH_S = 1.0
"""Period of asking Ray for its nodes. Ray notices a change in about a second; asking takes 5 us
per node."""

NODE_RESOURCES = ("node:", "memory", "object_store_memory", "accelerator_type:")
"""Prefixes of the names of resources that are irrelevant for the trials a node can run."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The time in seconds that a search waits for a worker that can run its trials.

    `at_first_s` applies before there was such a worker, `later_s` after the last one was lost.
    """

    at_first_s: float
    later_s: float


OWN_CLUSTER = Waiting(at_first_s=0.0, later_s=0.0)
"""A private cluster gets no more nodes."""
FIXED_CLUSTER = Waiting(at_first_s=0.0, later_s=300.0)
"""A fixed cluster starts no nodes; restarting a node or its network takes some minutes."""
GROWING_CLUSTER = Waiting(at_first_s=1800.0, later_s=1800.0)
"""A growing cluster may take a quarter of an hour to start a GPU machine with its image."""


class Capacity:
    """The room of the cluster for trials with given resources.

    `nodes` returns the resources of each node that is alive; it is called once in `REFRESH_S`.
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
        """Number of trials with these resources that all nodes together can run at once."""
        self._refresh()
        return sum(fits_on(node, resources) for node in self._nodes)

    def missing(
        self, resources: Resources, *, waited_s: float, was_there: bool
    ) -> UnavailableError:
        """The error if no node can run a trial with these resources."""
        return no_node(self._nodes, resources, waited_s=waited_s, was_there=was_there)

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._asked_s >= REFRESH_S:
            self._nodes, self._asked_s = self._ask(), now_s


def alive_nodes() -> list[Resources]:
    """The total resources of each node that Ray considers alive.

    Raises `RayLostError` if a Ray process on this machine is lost, because asking would block.
    """
    require_alive()
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def fits_on(node: Resources, resources: Resources) -> int:
    """Number of trials with these resources that one node can run at once."""
    shares = [node.get(name, 0.0) / need for name, need in resources.items() if need]
    return math.floor(min(shares, default=1.0))


def no_node(
    nodes: Sequence[Resources], resources: Resources, *, waited_s: float, was_there: bool = False
) -> UnavailableError:
    """The error if no node can run a trial, with the missing and the offered resources."""
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
    """The names of the node's resources that are relevant for trials."""
    return [
        name
        for name, amount in node.items()
        if amount and not name.startswith(NODE_RESOURCES) and "_group_" not in name
    ]


def listed(resources: Resources) -> str:
    """Resources as people write them: "1 a6000, 1 CPU"."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount)


TURN = 10
"""Number of trials that one search runs before another gets the same workers. A change takes
seconds, in which a new worker imports torch."""


LOOK_S = 1.0


class PlaceholderDemand:
    """Keeps placement groups waiting for missing resources, so that the autoscaler adds nodes.

    They end with the connection to Ray. Waiting trials of Ray Tune would show the demand too, but
    while one waits, Ray keeps no worker for its next trial.
    """

    def __init__(self) -> None:
        self._groups: dict[int, list[PlacementGroup]] = {}
        self._looked_s: dict[int, float] = {}

    def show(self, key: int, resources: dict[str, float], count: int) -> None:
        """Wait for these resources on `count` nodes, 0 or more.

        A group that was placed is removed at once, so that trials get its room.
        """
        groups = self._groups.setdefault(key, [])
        if count == len(groups) == 0:
            return
        now_s = time.monotonic()
        if now_s - self._looked_s.get(key, 0.0) < LOOK_S and count == len(groups):
            return
        self._looked_s[key] = now_s
        waiting = [group for group in groups if not _is_placed(group)]
        for group in groups:
            if group not in waiting[:count]:
                ray.util.remove_placement_group(group)
        added = [ray.util.placement_group([resources]) for _ in range(count - len(waiting))]
        self._groups[key] = waiting[:count] + added


def _is_placed(group: PlacementGroup) -> bool:
    return bool(ray.util.placement_group_table(group).get("state") == "CREATED")


def first_broken(states: Iterable[SearchState]) -> Exception | None:
    """The first exception that a callback of a search raised; None without one."""
    return next((state.broken for state in states if state.broken is not None), None)


class ConcurrentSearches:
    """The states of searches that run side by side, in the order of their requests."""

    def __init__(
        self,
        requests: Sequence[SearchRequest],
        states: Sequence[SearchState],
        rooms: Capacity,
        *,
        waiting: Waiting,
        demand: PlaceholderDemand | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_decision: Callable[[int, float], None] = lambda index, seconds: None,
    ) -> None:
        """`on_decision` gets the index of a search and the seconds it took to choose a trial."""
        self.states = tuple(states)
        self._requests = tuple(requests)
        self._resources = [dict(request.resources_per_trial) for request in requests]
        self._rooms = rooms
        self._waiting = [
            waiting if r.node_wait_s is None else Waiting(r.node_wait_s, r.node_wait_s)
            for r in requests
        ]
        self._demand = demand
        self._clock = clock
        self._without_since: dict[int, float] = {}
        self._had: set[int] = set()
        self._on_decision = on_decision
        self._owners: dict[str, int] = {}
        self._sharing = [
            [i for i, other in enumerate(self._resources) if other == mine]
            for mine in self._resources
        ]

    @property
    def over(self) -> bool:
        """True if all searches are over."""
        return self.broken is not None or all(state.over for state in self.states)

    @property
    def interrupted(self) -> bool:
        """True if all searches were interrupted."""
        return all(state.stopped_by is StoppedBy.INTERRUPTED for state in self.states)

    @property
    def broken(self) -> Exception | None:
        """The exception that a callback of any search raised; None without one."""
        return first_broken(self.states)

    def index_of(self, run: str) -> int:
        """The index of a run's search."""
        return self._owners[run]

    def state_of(self, run: str) -> SearchState:
        """The state of a run's search."""
        return self.states[self._owners[run]]

    def report(self) -> None:
        """Report the progress, if it is time."""
        if self.states:
            self.states[0].report(periodic=True)

    def propose(self, run: str) -> Configuration | None:
        """The configuration of the next run that has room now; None without room or trial."""
        if self.broken is not None:
            return None
        for index in sorted(range(len(self.states)), key=self._turn):
            state = self.states[index]
            if state.over or not self._has_room(index):
                continue
            started_s = time.perf_counter()
            configuration = state.propose(run)
            if configuration is not None:
                self._on_decision(index, time.perf_counter() - started_s)
                self._owners[run] = index
                return configuration
        return None

    def keeps_worker(self, index: int) -> bool:
        """True if an idle worker of this search should be kept for its next trial."""
        if self.states[index].over or self.broken is not None:
            return False
        others = (self.states[i] for i in self._sharing[index] if i != index)
        return self.states[index].open.are_waiting or not any(
            state.open.are_waiting for state in others
        )

    def _turn(self, index: int) -> tuple[int, int]:
        return self.states[index].open.handed_out // TURN, index

    def recalled(self) -> list[str]:
        """Take back runs that will get no worker, and return them for Ray to stop.

        Their trials are handed out again once there is room, unless their search is over.
        """
        runs: list[str] = []
        for index, state in enumerate(self.states):
            if not state.open.are_waiting:
                continue
            waiting = state.open.waiting
            if not state.over:
                waiting = waiting[: max(0, -self._free(index))]
            for run in waiting:
                state.recall(run)
            runs += waiting
        return runs

    def _has_room(self, index: int) -> bool:
        request, state = self._requests[index], self.states[index]
        capacity = self._rooms.capacity(self._resources[index])
        self._show_demand(index, capacity)
        usable = capacity - len(self._unfit(index))
        if usable <= 0:
            self._wait_or_fail(index)
            return False
        self._without_since.pop(index, None)
        self._had.add(index)
        at_most = request.max_concurrent
        return self._free(index) > 0 and (at_most is None or state.open.on_workers < at_most)

    def _free(self, index: int) -> int:
        """Number of workers free for a trial; negative if more trials wait than can begin."""
        taken = sum(self.states[i].open.on_workers for i in self._sharing[index])
        capacity = self._rooms.capacity(self._resources[index])
        return capacity - len(self._unfit(index)) - taken

    def _unfit(self, index: int) -> list[TunerError]:
        """Errors of workers that hold these resources but can run no trial."""
        states = [self.states[i] for i in self._sharing[index]]
        return [e for each in states if not each.over for e in each.unfit_workers.values()]

    def _wait_or_fail(self, index: int) -> None:
        """Fail the search if it has no usable worker and has waited long enough for one."""
        state, unfit = self.states[index], self._unfit(index)
        if state.open.on_workers:
            return
        now_s = self._clock()
        waits_s = now_s - self._without_since.setdefault(index, now_s)
        # A worker that refused its first trial does not count.
        was_there = state.has_outcomes or (index in self._had and not unfit)
        waiting = self._waiting[index]
        limit_s = waiting.later_s if was_there else waiting.at_first_s
        if waits_s >= limit_s:
            state.fail(
                unfit[0] if unfit else self._rooms.missing(
                    self._resources[index], waited_s=limit_s, was_there=was_there
                )
            )  # fmt: skip

    def _show_demand(self, index: int, capacity: int) -> None:
        """Show the nodes that are missing for `max_concurrent` trials, or for one by default."""
        if self._demand is not None:
            wanted = self._requests[index].max_concurrent or 1
            self._demand.show(index, self._resources[index], max(0, wanted - capacity))
