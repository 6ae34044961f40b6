"""The runs of searches that go on side by side: their nodes, and whose trial is next. No Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.core.environment import masked, secret_values
from tuner.core.errors import TunerError, UnavailableError
from tuner.core.records import Configuration, Outcome
from tuner.searches.nodes import SILENT_S, Need, Node, Nodes, fits_on
from tuner.searches.open_trials import Proposed
from tuner.searches.request import SearchRequest
from tuner.searches.state import SearchState, first_broken
from tuner.searches.worker import WorkerPlan

TURN = 10
"""Number of trials that one search runs before another gets the same workers. A change takes
seconds, in which a new worker imports torch."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The time in seconds that a search waits for a worker that can run its trials.

    `at_first_s` applies before there was such a worker, `later_s` after the last one was lost.
    """

    at_first_s: float
    later_s: float


OWN_CLUSTER = _Waiting(at_first_s=0.0, later_s=0.0)
"""A private cluster gets no more nodes."""
FIXED_CLUSTER = _Waiting(at_first_s=0.0, later_s=300.0)
"""A fixed cluster starts no nodes; restarting a node or its network takes some minutes."""
GROWING_CLUSTER = _Waiting(at_first_s=1800.0, later_s=1800.0)
"""A growing cluster may take a quarter of an hour to start a GPU machine with its image."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of a trial of the search `index` on a node, under a name for people."""

    index: int
    node: Node
    name: str
    proposed: Proposed


class Crew:
    """The runs of searches that go on side by side, in the order of their requests."""

    def __init__(
        self,
        requests: Sequence[SearchRequest],
        states: Sequence[SearchState],
        nodes: Nodes,
        *,
        demand: Callable[[int, Need, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_decision: Callable[[str, float], None] = lambda gpu, seconds: None,
    ) -> None:
        """`demand` shows missing nodes to the autoscaler of a cluster that has one.

        It asks for a number of nodes, 0 or more, that meet the need of the search with an index.
        `on_decision` gets the GPU type of a search and the seconds it took to choose a trial.
        """
        self.states = tuple(states)
        self.needs = [Need.of(request) for request in requests]
        self._requests, self._nodes = tuple(requests), nodes
        self._clock, self._on_decision = clock, on_decision
        self._runs: dict[str, _Run] = {}
        self._without_since: dict[int, float] = {}
        self._had: set[int] = set()
        self._demand = demand
        self._said_silent = False

    @property
    def over(self) -> bool:
        """True if all searches are over."""
        return first_broken(self.states) is not None or all(state.over for state in self.states)

    def given_up(self) -> list[str]:
        """The runs of searches that are over, and those whose node is gone before they began."""
        over = self.over
        return [
            run
            for run, one in self._runs.items()
            if over or self.states[one.index].over or (self._waits(run) and self._is_gone(one.node))
        ]

    def _waits(self, run: str) -> bool:
        """True if no worker has begun the run."""
        state = self.states[self._runs[run].index]
        return run in state.open and state.open.is_waiting(run)

    def _is_gone(self, node: Node) -> bool:
        return all(other.id != node.id for other in self._nodes.alive)

    def step(self) -> None:
        """Look at the nodes and the time. Raises `UnavailableError` if Ray is lost."""
        self.states[0].report(periodic=True)
        self._nodes.refresh()
        self._require_ray()
        for state in self.states:
            state.give_up_late()

    def propose(self, run: str) -> _Run | None:
        """The next run, of the search whose turn it is; None while there is no room or trial."""
        found = (self._begin(index, run) for index in self._turns() if not self.over)
        return next((one for one in found if one is not None), None)

    def begin(self, run: str) -> None:
        """Note that a worker begins the run."""
        self.states[self._runs[run].index].start(run)

    def end(self, run: str, outcome: Outcome) -> None:
        """Take the outcome of a run."""
        one = self._runs.pop(run, None)
        if one is None:
            return
        joined = self._requests[one.index].options.address is not None
        self.states[one.index].end(run, outcome, node=one.node.name if joined else None)

    def refuse(self, run: str, error: TunerError) -> None:
        """Take the error of a worker that can run no trial, and keeps its place."""
        self.states[self._runs[run].index].refuse(run, error)

    def lose(self, run: str, said: str, *, preempted: bool = False) -> None:
        """Take the loss of the run's worker, of which Ray says this."""
        if run not in self._runs:
            return
        self._nodes.refresh(wait=True)
        waits, one = self._waits(run), self._runs.pop(run)
        state, gone = self.states[one.index], self._is_gone(one.node)
        if gone and waits:
            state.recall(run)
            return
        state.lose(run, _loss_text(said, one.node, gone=gone, preempted=preempted), with_node=gone)

    def _require_ray(self) -> None:
        """Raise if Ray's own processes on this machine are gone; say it if the head is silent."""
        address = self._requests[0].options.address
        if address is None and not self._nodes.alive:
            raise lost_ray("its raylet has ended")
        if self._nodes.silent_s > SILENT_S and not self._said_silent:
            self._said_silent = True
            self._requests[0].tell(
                f"warning: Ray's head node has been silent for {SILENT_S:.0f} s; every finished "
                "trial is in the journal, and the same command goes on from there"
            )

    def _turns(self) -> list[int]:
        def turn(index: int) -> tuple[int, int]:
            return self.states[index].open.handed_out // TURN, index

        return sorted(range(len(self.states)), key=turn)

    def _begin(self, index: int, run: str) -> _Run | None:
        """Begin one run of a search on a node with room; None without room or trial."""
        request, state = self._requests[index], self.states[index]
        if state.over:
            return None
        nodes = self._nodes.usable(self.needs[index])
        self._show_demand(index, nodes)
        unfit = len(state.unfit_workers)
        room = sum(fits_on(n.resources, self.needs[index].resources) for n in nodes) - unfit
        if room <= 0:
            self._wait_or_fail(index)
            return None
        self._without_since.pop(index, None)
        self._had.add(index)
        at_most = request.options.workers
        if at_most is not None and state.open.on_workers >= at_most:
            return None
        node = next((n for n in nodes if self._has_room(n, index)), None)
        began_s = time.perf_counter()
        if node is None or state.propose(run) is None:
            return None
        self._on_decision(request.gpu.id, time.perf_counter() - began_s)
        proposed = state.open[run]
        name = f"{_title(request, proposed.configuration)} #{proposed.number}"
        self._runs[run] = _Run(index, node, name, proposed)
        return self._runs[run]

    def _has_room(self, node: Node, index: int) -> bool:
        free = dict(node.resources)
        for one in self._runs.values():
            if one.node.id == node.id:
                for name, amount in self.needs[one.index].resources.items():
                    free[name] = free.get(name, 0.0) - amount
        return fits_on(free, self.needs[index].resources) >= 1

    def plan(self, index: int) -> WorkerPlan:
        """The plan of the workers of a search."""
        request = self._requests[index]
        return WorkerPlan(
            request.runner_factory,
            threads=max(1, int(request.resources_per_trial.get("CPU", 1))),
            folder=str(Path.cwd()),
            title=f"{request.title or request.space.name} on {request.gpu.id}",
        )

    def _wait_or_fail(self, index: int) -> None:
        """Fail the search if it has no usable worker and has waited long enough for one."""
        state, need = self.states[index], self.needs[index]
        if state.open.on_workers or self._nodes.asked(need):
            return
        now_s = self._clock()
        waits_s = now_s - self._without_since.setdefault(index, now_s)
        # A worker that refused its first trial does not count.
        was_there = state.has_outcomes or (index in self._had and not state.unfit_workers)
        waiting = self._waiting(index)
        limit_s = waiting.later_s if was_there else waiting.at_first_s
        if waits_s >= limit_s:
            unfit = list(state.unfit_workers.values())
            missing = self._nodes.missing(need, waited_s=limit_s, was_there=was_there)
            state.fail(unfit[0] if unfit else missing)

    def _waiting(self, index: int) -> _Waiting:
        own = self._requests[index].node_wait_s
        if own is not None:
            return _Waiting(own, own)
        if self._requests[index].options.address is None:
            return OWN_CLUSTER
        return GROWING_CLUSTER if self._demand is not None else FIXED_CLUSTER

    def _show_demand(self, index: int, nodes: Sequence[Node]) -> None:
        """Show the nodes that are missing for `workers` trials at once, or for one by default."""
        if self._demand is not None:
            need = self.needs[index]
            has = sum(fits_on(node.resources, need.resources) for node in nodes)
            wanted = self._requests[index].options.workers or 1
            self._demand(index, need, max(0, wanted - has))


def _loss_text(said: str, node: Node, *, gone: bool, preempted: bool) -> str:
    """The loss of a worker in one line, with its node and the end of Ray's text."""
    lines = masked(said, secret_values(os.environ)).strip().splitlines() or ["its worker was lost"]
    if gone:
        spot = " (it was taken away)" if preempted else ""
        return f"its node has died: {node.name}{spot}"
    return f"{lines[-1].strip()} (on {node.name})"


def lost_ray(what: str) -> UnavailableError:
    """The error for the loss of Ray during a search."""
    return UnavailableError(
        f"Ray on this machine was lost during the search: {what}",
        hint="every finished trial is in the journal, and the same command goes on from there; if "
        "this happens again, check whether memory ran out (`dmesg`), and use fewer --workers",
    )


_SHORT = {"micro_batch": "mb={}", "lora_rank": "r={}", "max_length": "len={}"}


def _title(request: SearchRequest, configuration: Configuration) -> str:
    """A trial by what it trains, for Ray's dashboard: "llama-3.2-1b mb=4 ckpt sdpa"."""
    words = [request.title or request.space.name]
    for name in request.space.knobs:
        value = configuration.get(name)
        if name == "gradient_checkpointing" and isinstance(value, bool):
            words += ["ckpt"] * value
        elif isinstance(value, str):
            words.append(value)
        elif value is not None:
            words.append(_SHORT.get(name, name + "={}").format(value))
    return " ".join(words)
