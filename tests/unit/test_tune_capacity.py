"""Whose trial is next and whether there is room for it, over nodes that are only numbers."""

from __future__ import annotations

import pytest
from tune_fakes import SMALL_SPACE, FakeFactory, outcome_of

from tuner.core.errors import UnavailableError
from tuner.searches.candidates import Candidates
from tuner.searches.proposer import Proposer
from tuner.searches.ray.callbacks import IDLE_S, RequestedResources, WorkerCache
from tuner.searches.ray.rooms import (
    FIXED_CLUSTER,
    OWN_CLUSTER,
    REFRESH_S,
    TURN,
    Capacity,
    ConcurrentSearches,
    fits_on,
)
from tuner.searches.request import SearchRequest, StoppedBy
from tuner.searches.state import LOSSES_THAT_END_A_SEARCH, SearchState
from tuner.space.gpus import get_gpu

A6000 = {"GPU": 1.0, "a6000": 1.0, "CPU": 1.0}
L4 = {"GPU": 1.0, "l4": 1.0, "CPU": 1.0}


class World:
    """A clock, and the nodes of a cluster."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self.nodes = list(nodes)
        self.now_s = 0.0
        self.rooms = Capacity(lambda: tuple(self.nodes), clock=lambda: self.now_s)
        self.shown: dict[int, int] = {}

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds

    def show(self, key: int, resources: dict[str, float], count: int) -> None:
        self.shown[key] = count

    def searches(
        self, *needed: dict[str, float], waiting=FIXED_CLUSTER, **changes
    ) -> ConcurrentSearches:
        requests = [
            SearchRequest(
                space=SMALL_SPACE, gpu=get_gpu("a6000"), runner_factory=FakeFactory(),
                searcher="random", trials=40, resources_per_trial=resources, run_id="r", **changes,
            )
            for resources in needed
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
        return ConcurrentSearches(
            requests, states, self.rooms, waiting=waiting, demand=self, clock=lambda: self.now_s
        )


def proposed(searches: ConcurrentSearches, name: str) -> list[int]:
    """The searches of all runs for which there is room now."""
    found = []
    while searches.propose(run := f"{name}{len(found)}") is not None:
        found.append(searches.index_of(run))
    return found


def finish(searches: ConcurrentSearches, run: str) -> None:
    state = searches.state_of(run)
    configuration = state.open[run].configuration
    state.start(run)
    state.end(run, outcome_of(configuration))


@pytest.mark.parametrize(
    ("node", "count"),
    [({"GPU": 4, "a6000": 4, "CPU": 2}, 2), ({"GPU": 4, "CPU": 8}, 0), ({"a6000": 1, "CPU": 1}, 0)],
)
def test_a_node_holds_what_all_its_resources_allow(node, count):
    assert fits_on(node, A6000) == count


def test_room_is_counted_node_by_node_and_follows_them():
    world = World({"GPU": 1, "a6000": 1}, {"CPU": 64})
    assert world.rooms.capacity(A6000) == 0
    world.nodes.append({"GPU": 2, "a6000": 2, "CPU": 2})
    assert world.rooms.capacity(A6000) == 0
    world.pass_s(REFRESH_S)
    assert world.rooms.capacity(A6000) == 2


def test_each_type_gets_what_there_is_room_for_and_no_more():
    world = World({"GPU": 2, "a6000": 2, "CPU": 2}, {"GPU": 1, "l4": 1, "CPU": 1})
    searches = world.searches(A6000, L4)
    assert sorted(proposed(searches, "a")) == [0, 0, 1]
    assert proposed(searches, "b") == []
    finish(searches, "a0")
    assert proposed(searches, "c") == [searches.index_of("a0")]


def test_at_most_as_many_as_were_asked_for_and_the_rest_is_shown_as_demand():
    world = World({"GPU": 2, "a6000": 2, "CPU": 2})
    searches = world.searches(A6000, max_concurrent=1)
    assert proposed(searches, "a") == [0]
    assert world.shown == {0: 0}
    searches = world.searches(A6000, L4, max_concurrent=4)
    assert proposed(searches, "b") == [0, 0]
    assert world.shown == {0: 2, 1: 4}


def test_searches_that_share_workers_take_turns():
    world = World({"CPU": 1})
    searches = world.searches({"CPU": 1.0}, {"CPU": 1.0})
    order = []
    while not searches.over:
        run = str(len(order))
        if searches.propose(run) is not None:
            order.append(searches.index_of(run))
            assert searches.propose("no room") is None
            finish(searches, run)
    assert len(SMALL_SPACE.values["micro_batch"]) * 2 == 6 < TURN
    assert order == [0] * 6 + [1] * 6


def test_run_whose_node_went_is_recalled_and_its_trial_comes_again():
    world = World({"GPU": 1, "a6000": 1, "CPU": 1})
    searches = world.searches(A6000)
    wanted = searches.propose("a")
    world.nodes.clear()
    world.pass_s(REFRESH_S)
    assert proposed(searches, "b") == []
    assert searches.recalled() == ["a"]
    assert proposed(searches, "c") == []
    assert not searches.over  # there was a node: another one is waited for
    world.nodes.append({"GPU": 1, "a6000": 1, "CPU": 1})
    world.pass_s(REFRESH_S)
    again = searches.propose("d")
    assert (again, searches.states[0].open["d"].number) == (wanted, 1)
    world.nodes.clear()
    world.pass_s(REFRESH_S)
    assert searches.propose("e") is None
    assert searches.recalled() == ["d"]
    searches.propose("f")
    world.pass_s(FIXED_CLUSTER.later_s)
    searches.propose("g")
    assert "no node of the cluster is left that has 1 GPU, 1 a6000, 1 CPU, after 300 s" in str(
        searches.states[0].failure
    )


def test_type_without_a_node_fails_at_once_unless_it_is_to_wait():
    world = World({"GPU": 1, "l4": 1, "CPU": 8})
    searches = world.searches(A6000, L4)
    assert proposed(searches, "a") == [1]
    failure = searches.states[0].failure
    assert isinstance(failure, UnavailableError)
    assert "has 1 a6000" in failure.message
    assert "its nodes offer CPU, GPU, l4" in failure.message
    assert "tuner node-resources" in failure.hint
    assert searches.states[0].result().stopped_by is StoppedBy.FAILED
    searches = world.searches(A6000, node_wait_s=60.0)
    for _ in range(2):
        assert proposed(searches, "b") == []
        assert not searches.over
        world.pass_s(59.0 - world.now_s)
    world.pass_s(2.0)
    assert (proposed(searches, "c"), searches.over) == ([], True)


def test_search_fails_where_every_worker_is_unfit_and_no_other_may_come():
    world = World({"GPU": 1, "a6000": 1, "CPU": 1})
    searches = world.searches(A6000, waiting=OWN_CLUSTER)
    searches.propose("a")
    state = searches.states[0]
    state.start("a")
    state.refuse("a", wrong := UnavailableError("it is an L4"))
    assert searches.propose("b") is None
    assert state.failure is wrong


@pytest.mark.parametrize("trials", [0, 1, 4])
def test_lone_gpu_that_is_lost_ends_its_search_alone_however_many_trials_there_were(trials):
    world = World({"GPU": 1, "a6000": 1, "CPU": 1}, {"GPU": 1, "l4": 1, "CPU": 1})
    searches = world.searches(A6000, L4, waiting=OWN_CLUSTER)
    lost, other = searches.states
    for number in range(trials + 1):
        runs = [f"{number}a", f"{number}b"]
        assert all(searches.propose(run) is not None for run in runs)
        assert sorted(map(searches.index_of, runs)) == [0, 1]
        for run in runs if number < trials else ():
            finish(searches, run)
    (run,) = (run for run in runs if searches.index_of(run) == 0)
    lost.start(run)
    lost.refuse(run, error := UnavailableError("GPU 0 is lost"))
    assert searches.propose("more") is None
    assert (lost.failure, lost.over, len(lost.records)) == (error, True, trials)
    assert (other.failure, other.over) == (None, False)


def test_workers_that_end_on_a_lost_gpu_do_not_come_again_for_ever():
    world = World({"GPU": 1, "a6000": 1, "CPU": 1})
    searches = world.searches(A6000)
    assert searches.propose("good") is not None
    finish(searches, "good")
    state, error = searches.states[0], UnavailableError("GPU 0 is lost")
    for number in range(LOSSES_THAT_END_A_SEARCH):
        assert state.failure is None
        run = str(number)
        assert searches.propose(run) is not None
        state.start(run)
        state.refuse(run, error)
        state.lose(run, "the worker process was lost")
    assert (state.failure, len(state.records)) == (error, 1)


def test_workers_are_kept_apart_and_not_kept_for_long():
    first, same, other = (RequestedResources({"CPU": 1.0}, index) for index in (0, 0, 1))
    assert (first == same, first == other, hash(first) == hash(same)) == (True, False, True)
    now_s = 0.0
    kept = {0: True, 1: True}
    cache = WorkerCache(kept.__getitem__, clock=lambda: now_s)
    assert cache.cache_object(first, "worker")
    assert (cache.has_cached_object(same), cache.has_cached_object(other)) == (True, False)
    assert cache.pop_cached_object(other) is None
    assert list(cache.flush_cached_objects()) == []
    assert cache.pop_cached_object(same) == "worker"
    cache.cache_object(first, "idle")
    now_s = IDLE_S
    assert list(cache.flush_cached_objects()) == ["idle"]
    cache.cache_object(other, "of one that is over")
    kept[1] = False
    assert list(cache.flush_cached_objects()) == ["of one that is over"]
    assert not cache.cache_object(other, "another")
    assert cache.num_cached_objects == 0
