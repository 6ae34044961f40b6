"""The workers of searches that run side by side: their places, and whose trial is next. No Ray."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tuner.core.environment import masked, secret_values
from tuner.core.errors import TunerError, UnavailableError
from tuner.core.records import Configuration, Outcome
from tuner.searches.nodes import SILENT_S, Need, Node, Nodes, fits_on
from tuner.searches.open_trials import Proposed
from tuner.searches.progress import StoppedBy
from tuner.searches.request import SearchRequest
from tuner.searches.state import SearchState, first_broken
from tuner.searches.worker import WorkerPlan

TURN = 10
"""Number of trials that one search runs before another gets the same workers. A change takes
seconds, in which a new worker imports torch."""

IDLE_S = 10.0
"""A worker without a trial gives its GPU back to the cluster after this time."""

WAIT_S = 0.5
"""Time between two looks at the nodes and at signals; the end of a trial is seen at once."""

CLOSE_WITHIN_S = 10.0
"""Idle workers have this long to remove what they keep."""


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


class Demand(Protocol):
    """Shows missing nodes to an autoscaler."""

    def show(self, key: int, need: Need, count: int) -> None:
        """Ask for `count` nodes, 0 or more, that meet the need of the search `key`."""
        ...


class Actor(Protocol):
    """A process that runs trials on a node. An exception of its answers means that it is lost."""

    def prepare(self) -> Future[TunerError | None]:
        """Begin to import what trials need; answers with the error if no trial can run."""
        ...

    def run(self, name: str, proposed: Proposed) -> Future[Outcome | TunerError]:
        """Begin a trial under a name for people; an error says that no trial can run here."""
        ...

    def close(self) -> Future[None]:
        """Begin to remove what it keeps."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


@dataclass(slots=True, eq=False)
class Worker:
    """An actor of the search `index` on a node, and the answer that it owes.

    `run` is its trial, None while it is idle; an unfit worker can run none, and keeps its place.
    """

    actor: Actor
    index: int
    node: Node
    answer: Future[Any]
    run: str | None
    is_prepared: bool = False
    is_unfit: bool = False
    idle_since_s: float = 0.0

    @property
    def is_idle(self) -> bool:
        """True if it may begin a trial."""
        return self.run is None and not self.is_unfit


class Crew:
    """The workers of searches that run side by side, in the order of their requests."""

    def __init__(
        self,
        requests: Sequence[SearchRequest],
        states: Sequence[SearchState],
        nodes: Nodes,
        *,
        start: Callable[[WorkerPlan, Node, Need], Actor],
        demand: Demand | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_decision: Callable[[str, float], None] = lambda gpu, seconds: None,
    ) -> None:
        """`demand` shows missing nodes to the autoscaler of a cluster that has one.

        `on_decision` gets the GPU type of a search and the seconds it took to choose a trial.
        """
        self.states = tuple(states)
        self.workers: list[Worker] = []
        self._requests, self._nodes, self._start = tuple(requests), nodes, start
        self._needs = [Need.of(request) for request in requests]
        self._clock, self._on_decision = clock, on_decision
        self._without_since: dict[int, float] = {}
        self._had: set[int] = set()
        self._demand = demand
        self._said_silent = False

    @property
    def over(self) -> bool:
        """True if all searches are over."""
        return first_broken(self.states) is not None or all(state.over for state in self.states)

    def run(self) -> None:
        """Run trials until all searches are over. Raises `UnavailableError` if Ray is lost."""
        while not self.over:
            self.states[0].report(periodic=True)
            self.step()
            owed = [worker.answer for worker in self.workers if worker.run is not None]
            wait(owed, WAIT_S if owed else WAIT_S / 5, FIRST_COMPLETED)
            if not owed:
                time.sleep(WAIT_S / 5)
        if not all(state.stopped_by is StoppedBy.INTERRUPTED for state in self.states):
            for worker in list(self.workers):
                self._end(worker)

    def step(self) -> None:
        """Look at the nodes, take outcomes, and begin the trials for which there is room."""
        self._nodes.refresh()
        self._require_ray()
        for worker in [w for w in self.workers if w.run is not None and w.answer.done()]:
            self._take(worker, worker.run or "")
        for index, state in enumerate(self.states):
            state.give_up_late()
            self._recall(index)
        while not self.over and any(map(self._begin, self._turns())):
            pass
        for worker in list(self.workers):
            idle_s = self._clock() - worker.idle_since_s
            if self.states[worker.index].over or (worker.is_idle and idle_s > IDLE_S):
                self._end(worker)

    def _require_ray(self) -> None:
        """Raise if Ray's own processes on this machine are gone; say it if the head is silent."""
        address = self._requests[0].address
        if address is None and not self._nodes.alive:
            raise lost_ray("its raylet has ended")
        if self._nodes.silent_s > SILENT_S and not self._said_silent:
            self._said_silent = True
            self._requests[0].watch.tell(
                f"warning: Ray's head node has been silent for {SILENT_S:.0f} s; every finished "
                "trial is in the journal, and the same command goes on from there"
            )

    def _take(self, worker: Worker, run: str) -> None:
        """Take the answer of a worker: it is prepared, a trial has ended, or it is lost."""
        state = self.states[worker.index]
        if (error := worker.answer.exception()) is not None:
            self.workers.remove(worker)
            worker.actor.kill()
            self._nodes.refresh(wait=True)
            gone = all(node.id != worker.node.id for node in self._nodes.alive)
            state.lose(run, _loss_text(error, worker.node, gone=gone), with_node=gone)
            return
        answer = worker.answer.result()
        if isinstance(answer, TunerError):
            worker.is_unfit, worker.run = True, None
            state.refuse(run, answer)
        elif worker.is_prepared:
            worker.run, worker.idle_since_s = None, self._clock()
            joined = self._requests[worker.index].address is not None
            state.end(run, answer, node=worker.node.name if joined else None)
        else:
            worker.is_prepared = True
            self._send(worker, run)

    def _send(self, worker: Worker, run: str) -> None:
        """Let a worker that is prepared begin a trial."""
        worker.run, state = run, self.states[worker.index]
        if run not in state.open:  # was recalled
            worker.run, worker.idle_since_s = None, self._clock()
            return
        proposed = state.open[run]
        state.start(run)
        title = _title(self._requests[worker.index], proposed.configuration)
        worker.answer = worker.actor.run(f"{title} #{proposed.number}", proposed)

    def _turns(self) -> list[int]:
        def turn(index: int) -> tuple[int, int]:
            return self.states[index].open.handed_out // TURN, index

        return sorted(range(len(self.states)), key=turn)

    def _begin(self, index: int) -> bool:
        """Begin one trial of a search on an idle or a new worker; False without room or trial."""
        request, state = self._requests[index], self.states[index]
        if state.over:
            return False
        nodes = self._nodes.usable(self._needs[index])
        self._show_demand(index, nodes)
        unfit = sum(w.is_unfit and w.index == index for w in self.workers)
        room = sum(fits_on(n.resources, self._needs[index].resources) for n in nodes) - unfit
        if room <= 0:
            self._wait_or_fail(index)
            return False
        self._without_since.pop(index, None)
        self._had.add(index)
        at_most = request.max_concurrent
        if at_most is not None and state.open.on_workers >= at_most:
            return False
        idle = self._idle(index, nodes)
        place = None if idle else self._place(index, nodes)
        if idle is None and place is None:
            return False
        run, began_s = uuid.uuid4().hex, time.perf_counter()
        if state.propose(run) is None:
            return False
        self._on_decision(request.gpu.id, time.perf_counter() - began_s)
        if idle is not None:
            self._send(idle, run)
        elif place is not None:
            node, others = place
            for other in others:
                self._end(other)
            actor = self._start(self._plan(index), node, self._needs[index])
            self.workers.append(Worker(actor, index, node, actor.prepare(), run))
        return True

    def _plan(self, index: int) -> WorkerPlan:
        request = self._requests[index]
        return WorkerPlan(
            request.runner_factory,
            threads=max(1, int(request.resources_per_trial.get("CPU", 1))),
            folder=str(Path.cwd()),
            title=f"{request.title or request.space.name} on {request.gpu.id}",
        )

    def _idle(self, index: int, nodes: Sequence[Node]) -> Worker | None:
        """The worker of the search that became idle last, which most likely lives."""
        living = {node.id for node in nodes}
        idle = [w for w in self.workers if w.index == index and w.is_idle and w.node.id in living]
        return max(idle, key=lambda worker: worker.idle_since_s, default=None)

    def _place(self, index: int, nodes: Sequence[Node]) -> tuple[Node, list[Worker]] | None:
        """A node with room for a new worker, and idle workers of other searches to end for it."""
        for node in nodes:
            here = [w for w in self.workers if w.node.id == node.id]
            free = dict(node.resources)
            ended: list[Worker] = []
            for worker in sorted(here, key=lambda w: w.is_idle):
                spare = worker.is_idle and worker.index != index
                if spare and fits_on(free, self._needs[index].resources) >= 1:
                    ended.append(worker)
                    continue
                for name, amount in self._needs[worker.index].resources.items():
                    free[name] = free.get(name, 0.0) - amount
            if fits_on(free, self._needs[index].resources) >= 1:
                return node, ended
        return None

    def _recall(self, index: int) -> None:
        """Take back trials whose new worker will not come, because its node is gone."""
        living = {node.id for node in self._nodes.alive}
        for worker in [w for w in self.workers if w.index == index and not w.is_prepared]:
            if worker.run is not None and worker.node.id not in living:
                self.states[index].recall(worker.run)
                self._end(worker)

    def _wait_or_fail(self, index: int) -> None:
        """Fail the search if it has no usable worker and has waited long enough for one."""
        state, need = self.states[index], self._needs[index]
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

    def _waiting(self, index: int) -> Waiting:
        own = self._requests[index].node_wait_s
        if own is not None:
            return Waiting(own, own)
        if self._requests[index].address is None:
            return OWN_CLUSTER
        return GROWING_CLUSTER if self._demand is not None else FIXED_CLUSTER

    def _show_demand(self, index: int, nodes: Sequence[Node]) -> None:
        """Show the nodes that are missing for `max_concurrent` trials, or for one by default."""
        if self._demand is not None:
            need = self._needs[index]
            has = sum(fits_on(node.resources, need.resources) for node in nodes)
            wanted = self._requests[index].max_concurrent or 1
            self._demand.show(index, need, max(0, wanted - has))

    def _end(self, worker: Worker) -> None:
        """End a worker; an idle one may remove what it keeps."""
        self.workers.remove(worker)
        if worker.is_idle and worker.is_prepared:
            wait([worker.actor.close()], CLOSE_WITHIN_S)
        worker.actor.kill()


def _loss_text(error: BaseException, node: Node, *, gone: bool) -> str:
    """The loss of a worker in one line, with its node and the end of Ray's text."""
    lines = masked(str(error), secret_values(os.environ)).strip().splitlines() or [repr(error)]
    if gone:
        spot = " (it was taken away)" if getattr(error, "preempted", False) else ""
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
