"""What one process of the benchmark does: a searcher, in one kind of world, for several seeds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import optuna

from benchmarks.search.baselines import (
    BatchFinder,
    Halving,
    Layers,
    Random,
    blind_searcher,
    optuna_searcher,
    shortlisted_searcher,
)
from benchmarks.search.guided import Guided
from benchmarks.search.replay import Searcher, replay
from benchmarks.search.report import Row, row_of
from benchmarks.search.scenarios import WORLDS, Scenario, make_world
from benchmarks.search.structural import STRUCTURAL
from benchmarks.search.tables import Table
from benchmarks.search.worlds import BELIEVED

Maker = Callable[[Table, int, int], Searcher]
"""Makes a searcher from a table, a seed and the number of trials."""


def _optuna(name: str, *, front: bool = False) -> Maker:
    return lambda table, seed, trials: optuna_searcher(
        name, table, seed=seed, trials=trials, front=front
    )


def _botorch(table: Table, seed: int, trials: int) -> Searcher:
    from benchmarks.search.botorch import BoTorch  # installed for this comparison alone

    return BoTorch(table, seed=seed)


SEARCHERS: Mapping[str, Maker] = {
    "guided": lambda table, seed, trials: Guided(table),
    "layers": lambda table, seed, trials: Layers(table),
    "blind": lambda table, seed, trials: blind_searcher(table, seed=seed, trials=trials),
    "tpe": _optuna("tpe"),
    "nsga2": _optuna("nsga2"),
    "gp": _optuna("gp"),
    "tpe-front": _optuna("tpe", front=True),
    "nsga2-front": _optuna("nsga2", front=True),
    "gp-front": _optuna("gp", front=True),
    "botorch": _botorch,
    "shortlist": lambda table, seed, trials: shortlisted_searcher(
        "tpe", table, seed=seed, trials=trials
    ),
    "random": lambda table, seed, trials: Random(table, seed=seed),
    "asha": lambda table, seed, trials: Halving(table, seed=seed),
    "halving": lambda table, seed, trials: BatchFinder(table, seed=seed, halving=True),
    "doubling": lambda table, seed, trials: BatchFinder(table, seed=seed, halving=False),
}


ALL_WORLDS = {**WORLDS, **STRUCTURAL, **BELIEVED}


@dataclass(frozen=True, slots=True)
class Task:
    """All seeds of one searcher in one kind of world."""

    table: Table
    world: str | Scenario
    searcher: str
    seeds: tuple[int, ...]
    trials: int

    @property
    def world_name(self) -> str:
        """The name of the world."""
        return self.world if isinstance(self.world, str) else self.world.name


def run_task(task: Task) -> list[Row]:
    """The rows of one task."""
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = []
    for seed in task.seeds:
        searcher = SEARCHERS[task.searcher](task.table, seed, task.trials)
        world = task.world
        if isinstance(world, str):
            world = make_world(world, task.table, seed, ALL_WORLDS)
        found = replay(world, searcher, trials=task.trials, seed=seed)
        rows.append(row_of(task.table.name, task.world_name, task.searcher, seed, found))
    return rows
