"""Whose trial is next and whether there is room for it, over nodes that are only numbers."""

import itertools
import re

import pytest
from node_fakes import answer_of, node_of
from tune_fakes import SMALL_SPACE, FakeFactory, outcome_of, request_of

from tuner.core.errors import UnavailableError
from tuner.core.records import Outcome, Status
from tuner.searches.candidates import Candidates
from tuner.searches.crew import FIXED_CLUSTER, TURN, Crew, _Run
from tuner.searches.nodes import REFRESH_S, Need, Node, Nodes, fits_on
from tuner.searches.proposer import Proposer
from tuner.searches.request import StoppedBy
from tuner.searches.state import LOSSES_THAT_END_A_SEARCH, SearchState
from tuner.space.gpus import get_gpu

A6000, L4 = "NVIDIA RTX A6000", "NVIDIA L4"


class World:
    """A clock, the nodes of a cluster, and the trials of searches on them."""

    def __init__(self, *nodes: Node) -> None:
        self.alive = list(nodes)
        self.now_s = 0.0
        self.runs: dict[str, _Run] = {}
        self.numbers = itertools.count()
        self.shown: dict[int, int] = {}

    def show(self, key: int, need: Need, count: int) -> None:
        self.shown[key] = count

    def crew(self, *gpus: str, trials=40, address="head:6379", demand=None, **changes) -> Crew:
        requests = [
            request_of(
                space=SMALL_SPACE, gpu=get_gpu(gpu), runner_factory=FakeFactory(), run_id="r",
                searcher="random", trials=trials, address=address,
                **({"resources_per_trial": {"GPU": 1.0, "CPU": 1.0}} | changes),
            )
            for gpu in gpus
        ]  # fmt: skip
        states = [
            SearchState(
                request,
                Proposer(
                    Candidates(list(SMALL_SPACE.configurations()), tuple(SMALL_SPACE.knobs)),
                    sampler="random", seed=0, trials=40,
                ),
                on_record=lambda record: None, on_progress=lambda progress: None,
            )
            for request in requests
        ]  # fmt: skip
        nodes = Nodes(lambda: tuple(self.alive), answer_of, clock=lambda: self.now_s)
        nodes.refresh(wait=True)
        self.nodes = nodes
        return Crew(requests, states, nodes, demand=demand, clock=lambda: self.now_s)

    def step(self, crew: Crew) -> None:
        """What Ray Tune does: asks for trials until there is none, and loses those given up."""
        crew.step()
        for run in crew.given_up():
            crew.lose(run, "it was killed")
            del self.runs[run]
        while (one := crew.propose(run := f"run {next(self.numbers)}")) is not None:
            self.runs[run] = one

    def begin(self, crew: Crew) -> None:
        """All trials that wait for a worker begin."""
        self.step(crew)
        for run, one in self.runs.items():
            if crew.states[one.index].open.is_waiting(run):
                crew.begin(run)

    def pass_s(self, crew: Crew, seconds: float) -> None:
        self.now_s += seconds
        self.nodes.refresh(wait=True)
        self.step(crew)

    def finish(self, crew: Crew, run: str, outcome: Outcome | None = None) -> None:
        one = self.runs.pop(run)
        crew.end(run, outcome or outcome_of(one.proposed.configuration))
        self.begin(crew)


def counts(crew: Crew) -> list[int]:
    """The number of trials on workers of each search."""
    return [state.open.on_workers for state in crew.states]


@pytest.mark.parametrize(
    ("node", "count"), [({"GPU": 4, "CPU": 2}, 2), ({"GPU": 4}, 0), ({"GPU": 0.5, "CPU": 1}, 0)]
)
def test_a_node_holds_what_all_its_resources_allow(node, count):
    assert fits_on(node, {"GPU": 1.0, "CPU": 1.0}) == count


def test_a_trial_on_several_gpus_fits_a_node_and_not_the_sum_of_two():
    world = World(*(node_of(A6000, GPU=4.0, CPU=8.0, number=n) for n in range(2)))
    eight = {"GPU": 8.0, "CPU": 8.0}
    crew = world.crew("a6000", resources_per_trial=eight)
    world.step(crew)
    failure = crew.states[0].failure
    assert isinstance(failure, UnavailableError)
    assert failure.message.count("has 4 GPU") == 2
    assert "8 GPU (a6000)" in failure.message


def test_each_type_gets_what_there_is_room_for_and_no_more():
    world = World(node_of(A6000, GPU=2.0), node_of(L4))
    crew = world.crew("a6000", "l4")
    world.begin(crew)
    assert counts(crew) == [2, 1]
    assert {one.node.id[:10] for one in world.runs.values() if one.index == 1} == {"NVIDIA L4/"}
    world.finish(crew, next(iter(world.runs)))
    assert counts(crew) == [2, 1]
    assert re.fullmatch(r"small mb=\d+ r=16 nf4 #3", [*world.runs.values()][-1].name)


def test_at_most_as_many_as_were_asked_for_and_the_rest_is_shown_as_demand():
    world = World(node_of(A6000, GPU=2.0))
    crew = world.crew("a6000", workers=1, demand=world.show)
    world.step(crew)
    assert (counts(crew), world.shown) == ([1], {0: 0})
    crew = world.crew("a6000", "l4", workers=4, demand=world.show)
    world.step(crew)
    assert counts(crew) == [2, 0]
    assert world.shown == {0: 2, 1: 4}
    assert not crew.states[1].over  # it waits for the autoscaler


def test_searches_that_share_workers_take_turns():
    world = World(Node("here", "here", {"CPU": 1.0}))
    crew = world.crew("a6000", "l4", address=None, resources_per_trial={"CPU": 1.0})
    order = []
    while not crew.over:
        world.begin(crew)
        ((run, one),) = world.runs.items()
        order.append(one.index)
        world.finish(crew, run)
    assert len(SMALL_SPACE.values["micro_batch"]) * 2 == 6 < TURN
    assert order == [0] * 6 + [1] * 6


def test_run_whose_node_went_is_recalled_and_its_trial_comes_again():
    world = World(node_of(A6000))
    crew = world.crew("a6000")
    world.step(crew)
    world.alive.clear()
    world.pass_s(crew, REFRESH_S)
    assert (counts(crew), world.runs) == ([0], {})
    assert not crew.over  # there was a node: another one is waited for
    world.alive.append(node_of(A6000, number=1))
    world.pass_s(crew, REFRESH_S)
    world.begin(crew)
    ((run, one),) = world.runs.items()
    assert one.name.endswith("#1")
    world.alive.clear()
    crew.lose(run, "the actor died")
    world.runs.clear()
    world.pass_s(crew, REFRESH_S)
    world.pass_s(crew, FIXED_CLUSTER.later_s)
    failure = crew.states[0].failure
    assert "no node of the cluster is left that can run a trial" in failure.message
    assert "1 GPU (a6000), 1 CPU, after 300 s" in failure.message


def test_type_without_a_node_fails_at_once_unless_it_is_to_wait():
    world = World(node_of(L4))
    crew = world.crew("a6000", "l4")
    world.step(crew)
    failure = crew.states[0].failure
    assert isinstance(failure, UnavailableError)
    assert "has NVIDIA L4" in failure.message
    assert crew.states[0].result().stopped_by is StoppedBy.FAILED
    assert counts(crew)[1] == 1
    crew = world.crew("a6000", node_wait_s=60.0)
    world.step(crew)
    world.pass_s(crew, 59.0)
    assert not crew.over
    world.pass_s(crew, 2.0)
    assert crew.over


@pytest.mark.parametrize("trials", [0, 1, 4])
def test_lone_gpu_that_is_lost_ends_its_search_alone_however_many_trials_there_were(trials):
    world = World(node_of(A6000), node_of(L4))
    crew = world.crew("a6000", "l4", node_wait_s=0.0)
    world.begin(crew)
    for _ in range(trials):
        for run in list(world.runs):
            world.finish(crew, run)
    lost, other = crew.states
    error = UnavailableError("GPU 0 is lost")
    (run,) = [run for run, one in world.runs.items() if one.index == 0]
    crew.refuse(run, error)
    world.step(crew)
    world.step(crew)
    assert (lost.failure, lost.over, len(lost.records)) == (error, True, trials)
    assert (other.failure, other.over) == (None, False)


def test_workers_that_end_on_a_lost_gpu_do_not_come_again_for_ever():
    world = World(node_of(A6000))
    crew = world.crew("a6000")
    world.begin(crew)
    world.finish(crew, next(iter(world.runs)))
    state, error = crew.states[0], UnavailableError("GPU 0 is lost")
    for number in range(LOSSES_THAT_END_A_SEARCH):
        assert state.failure is None
        run = f"lost {number}"
        state.propose(run)
        state.start(run)
        state.refuse(run, error)
        state.lose(run, "the worker process was lost")
    assert len(state.records) == 1


def test_a_killed_trial_is_tried_again_last_and_a_second_loss_is_said():
    world = World(node_of(A6000))
    crew = world.crew("a6000", trials=3)
    world.begin(crew)
    killed = Outcome(Status.INTERRUPTED, message="the process was ended by SIGKILL")
    ((run, first),) = world.runs.items()
    world.finish(crew, run, killed)
    for _ in range(2):
        ((run, one),) = world.runs.items()
        assert one.proposed.configuration != first.proposed.configuration
        world.finish(crew, run)
    ((run, one),) = world.runs.items()
    assert one.proposed.configuration == first.proposed.configuration
    world.finish(crew, run, killed)
    state = crew.states[0]
    assert state.over
    assert [r.outcome.status for r in state.records].count(Status.INTERRUPTED) == 1
    assert state.records[-1].outcome.message.startswith("tried again and lost again: the process")
    assert "a trial was tried again" in " ".join(state.result().warnings)
