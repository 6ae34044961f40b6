"""Several searches on one cluster: whose trial is next, and whether there is room for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tuner.core.errors import TunerError
from tuner.core.records import Configuration
from tuner.searches.budget import StoppedBy
from tuner.searches.ray.capacity import Capacity, Waiting
from tuner.searches.request import SearchRequest
from tuner.searches.state import SearchState

TURN = 10
"""Trials that one search runs before another gets the same workers: changing takes seconds, in
which a new worker imports torch."""


class Demand(Protocol):
    """Tells a cluster that grows what is waited for."""

    def show(self, key: int, resources: dict[str, float], count: int) -> None:
        """So many nodes' worth of these resources are waited for now, 0 and more."""
        ...


@dataclass(frozen=True, slots=True)
class Proposal:
    """One run to be given to Ray: `index` says of which search."""

    index: int
    configuration: Configuration


def first_broken(states: Iterable[SearchState]) -> Exception | None:
    """What a callback of any of the searches raised."""
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
        demand: Demand | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_decision: Callable[[int, float], None] = lambda index, seconds: None,
    ) -> None:
        """`on_decision` gets the index of a search, and how long it took to decide on a trial."""
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
        """Whether nothing is to come of any search."""
        return self.broken is not None or all(state.over for state in self.states)

    @property
    def interrupted(self) -> bool:
        """Whether all searches were asked to stop."""
        return all(state.stopped_by is StoppedBy.INTERRUPTED for state in self.states)

    @property
    def broken(self) -> Exception | None:
        """What a callback of any search raised."""
        return first_broken(self.states)

    def index_of(self, run: str) -> int:
        """Which search a run belongs to."""
        return self._owners[run]

    def state_of(self, run: str) -> SearchState:
        """The state of a run."""
        return self.states[self._owners[run]]

    def report(self) -> None:
        """Tell the progress, if it is time."""
        if self.states:
            self.states[0].report(periodic=True)

    def propose(self, run: str) -> Proposal | None:
        """A run of a trial for which there is room now; None where there is none, or no trial."""
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
                return Proposal(index, configuration)
        return None

    def keeps_worker(self, index: int) -> bool:
        """Whether an idle worker of this search is to be kept for its next trial."""
        if self.states[index].over or self.broken is not None:
            return False
        others = (self.states[i] for i in self._sharing[index] if i != index)
        return self.states[index].open.are_waiting or not any(
            state.open.are_waiting for state in others
        )

    def _turn(self, index: int) -> tuple[int, int]:
        return self.states[index].open.handed_out // TURN, index

    def recalled(self) -> list[str]:
        """Runs that wait for a worker that will not come, or not for them; to be stopped by Ray.

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
        """Workers that could take a trial now; negative where more trials wait than may begin."""
        taken = sum(self.states[i].open.on_workers for i in self._sharing[index])
        capacity = self._rooms.capacity(self._resources[index])
        return capacity - len(self._unfit(index)) - taken

    def _unfit(self, index: int) -> list[TunerError]:
        """Why workers that hold these resources can run no trial."""
        states = [self.states[i] for i in self._sharing[index]]
        return [e for each in states if not each.over for e in each.unfit_workers.values()]

    def _wait_or_fail(self, index: int) -> None:
        """No worker is left that could run a trial: the search fails, unless one may come."""
        state, unfit = self.states[index], self._unfit(index)
        if state.open.on_workers:
            return
        now_s = self._clock()
        waits_s = now_s - self._without_since.setdefault(index, now_s)
        # A worker that refused its first trial was none.
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
        """One node where there is none, and as many as were asked for where they were."""
        if self._demand is not None:
            wanted = self._requests[index].max_concurrent or 1
            self._demand.show(index, self._resources[index], max(0, wanted - capacity))
