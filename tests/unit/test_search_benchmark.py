"""The replay of searches: what it counts is what happened, and the worlds are what they say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tune_fakes import FakeSpace, outcome_of

from benchmarks.search.replay import Asked, fewest, hypervolume, replay
from benchmarks.search.report import append, read, row_of
from benchmarks.search.scenarios import WORLDS, make_world
from benchmarks.search.structural import STRUCTURAL
from benchmarks.search.tables import DEVICE, LIMIT, MARGIN, SAMPLES_PER_S, Table, arrays_of
from benchmarks.search.tasks import SEARCHERS

SPACE = FakeSpace()
CONFIGURATIONS = tuple(SPACE.configurations())


@pytest.fixture(scope="module")
def table() -> Table:
    arrays = arrays_of([outcome_of(c).prediction for c in CONFIGURATIONS])
    limit, margin = float(arrays.pop(LIMIT)[0]), float(arrays.pop(MARGIN)[0])
    return Table(
        name="fake on a6000",
        configurations=CONFIGURATIONS,
        knobs=tuple(SPACE.knobs),
        baseline=CONFIGURATIONS[0],
        arrays=arrays,
        limit_bytes=limit,
        margin_bytes=margin,
    )


class Fixed:
    """Runs a list of entries, and recommends the last."""

    def __init__(self, indices):
        self.left, self.last = list(indices), None

    def ask(self):
        return Asked(self.left.pop(0)) if self.left else None

    def tell(self, asked, trial):
        self.last = None if trial.oom else asked.index

    def recommend(self):
        return self.last


@pytest.mark.parametrize("name", WORLDS)
def test_world_is_decided_by_its_seed_and_something_fits(table, name):
    first, again, other = (make_world(name, table, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.samples_per_s, again.samples_per_s)
    assert name == "exact" or not np.array_equal(first.samples_per_s, other.samples_per_s)
    assert first.feasible.any()


@pytest.mark.parametrize("name", sorted(STRUCTURAL.keys() - {"other-gpu", "host-bound"}))
def test_structural_world_is_what_its_name_says(table, name):
    """All but those that need the predictions of another GPU, and steps of different length."""
    world, again = (make_world(name, table, 0, STRUCTURAL) for _ in range(2))
    assert np.array_equal(world.samples_per_s, again.samples_per_s)
    speed = world.samples_per_s / table.arrays[SAMPLES_PER_S]
    memory = world.device_bytes / table.arrays[DEVICE]
    off = np.array([not c["gradient_checkpointing"] for c in CONFIGURATIONS])
    if name == "crashing":
        failing = int(np.flatnonzero(world.crashes)[0])
        assert world.run(failing, np.random.default_rng(0)).failed
        assert not world.feasible[world.crashes].any()
        assert world.feasible.any()
    elif name in ("dark", "reentrant"):
        lower = off if name == "dark" else ~off
        assert memory[lower].max() < 0.95
        assert memory[~lower].min() >= 1
    elif name in ("underestimated", "fragments"):
        assert memory.max() > 1.05
        assert np.array_equal(speed, np.ones(len(speed)))
    elif name == "scattered":
        assert speed.min() < 0.99
        assert speed.max() > 1.01
    elif name == "compressed":
        order = np.argsort(table.arrays[SAMPLES_PER_S])
        assert (np.diff(world.samples_per_s[order]) >= 0).all()
        assert np.ptp(np.log(world.samples_per_s)) < 0.7 * np.ptp(
            np.log(table.arrays[SAMPLES_PER_S])
        )
    else:
        assert speed.min() < 0.99
        assert speed.max() <= 1.0
        assert memory.max() < 1.05


@pytest.mark.parametrize("name", ["tpe", "nsga2", "random", "blind"])
def test_who_knows_no_predictions_is_given_the_baseline(table, name):
    assert CONFIGURATIONS[SEARCHERS[name](table, 3, 12).ask().index] == table.baseline


def test_layers_are_fronts_of_what_is_predicted_to_fit(table):
    searcher, order = SEARCHERS["layers"](table, 0, 12), []
    while (asked := searcher.ask()) is not None:
        order.append(asked.index)
    fits = table.arrays[DEVICE] <= table.limit_bytes - table.margin_bytes
    assert sorted(order) == np.flatnonzero(fits).tolist()
    speed = table.arrays[SAMPLES_PER_S]
    assert speed[order[0]] == speed[fits].max()


@pytest.mark.parametrize(("name", "error"), [("levels-10", 0.1), ("levels-30", 0.3)])
def test_prior_is_as_wrong_as_the_name_says(table, name, error):
    world = make_world(name, table, 0)
    ratios = np.log(world.samples_per_s / table.arrays[SAMPLES_PER_S])
    assert np.sqrt(np.mean(ratios**2)) == pytest.approx(np.log1p(error))


def test_everything_covers_the_whole_hypervolume_and_costs_what_it_costs(table):
    world = make_world("levels-20", table, 0)
    result = replay(world, Fixed(range(len(CONFIGURATIONS))), trials=10**6, seed=0)
    assert result.hypervolume[-1] == pytest.approx(1.0)
    assert np.all(np.diff(result.hypervolume) >= 0)
    ran_out = world.device_bytes > table.limit_bytes
    # What is right at the limit may run out of memory in one trial and not in the next.
    assert sum(result.oom) == pytest.approx(ran_out.sum(), abs=2)
    assert result.wasted_s == pytest.approx(world.load_s[np.array(result.oom)].sum())
    assert result.seconds[-1] > result.wasted_s


def test_regret_is_that_of_what_is_recommended(table):
    world = make_world("exact", table, 0)
    fitting = np.flatnonzero(world.feasible)
    order = fitting[np.argsort(-world.samples_per_s[fitting])]
    too_large = int(np.argmax(world.device_bytes))
    result = replay(world, Fixed([too_large, order[3], order[0]]), trials=3, seed=0)
    gap = 1 - world.samples_per_s[order[3]] / world.samples_per_s[order[0]]
    assert result.oom == [True, False, False]
    assert result.regret == pytest.approx([1.0, gap, 0.0])


def test_hypervolume_of_two_points_by_hand():
    speed, size = np.array([2.0, 3.0, 1.0]), np.array([4.0, 6.0, 9.0])
    assert hypervolume(speed, size, 10.0) == pytest.approx(3 * 4 + 2 * 2)


@pytest.mark.parametrize("name", [name for name in SEARCHERS if name != "gp"])
def test_each_searcher_runs_and_its_row_survives_the_file(table, name, tmp_path):
    world = make_world("levels-10", table, 0)
    result = replay(world, SEARCHERS[name](table, 0, 12), trials=12, seed=0)
    row = row_of(table.name, world.name, name, 0, result)
    append(tmp_path / "rows.csv", [row])
    (again,) = read(tmp_path / "rows.csv")
    assert (again.searcher, again.trials) == (name, 12)
    assert again.oom_share == pytest.approx(np.mean(result.oom), abs=1e-4)


def test_batch_finders_follow_their_rule(table):
    """Halving goes down until a batch fits; doubling goes up until one does not."""
    for name, first in (("halving", max), ("doubling", min)):
        searcher = SEARCHERS[name](table, 0, 20)
        batches, group = [], None
        world = make_world("exact", table, 0)
        rng = np.random.default_rng(0)
        while True:
            asked = searcher.ask()
            others = tuple(
                CONFIGURATIONS[asked.index][k] for k in table.knobs if k != "micro_batch"
            )
            if group not in (None, others):
                break
            group = others
            trial = world.run(asked.index, rng)
            batches.append((CONFIGURATIONS[asked.index]["micro_batch"], trial.oom))
            searcher.tell(asked, trial)
        values = [b for b, _ in batches]
        assert values[0] == first(
            c["micro_batch"]
            for c in CONFIGURATIONS
            if group == tuple(c[k] for k in table.knobs if k != "micro_batch")
        )
        assert values == sorted(values, reverse=name == "halving")
        assert all(oom == (name == "halving") for _, oom in batches[:-1])


def test_who_knows_the_truth_needs_the_fewest_that_any_choice_needs():
    rng = np.random.default_rng(3)
    for _ in range(20):
        speed, size = rng.uniform(0.1, 1.0, 7), rng.uniform(0.1, 1.0, 7)
        whole = hypervolume(speed, size, 1.1)
        number = fewest(speed, size, 1.1, 0.99)

        def reaches(count, speed=speed, size=size, whole=whole):
            chosen = itertools.combinations(range(7), count)
            return any(hypervolume(speed[[*c]], size[[*c]], 1.1) >= 0.99 * whole for c in chosen)

        assert reaches(number)
        assert number == 1 or not reaches(number - 1)
