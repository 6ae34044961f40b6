"""What each constant of the guided search is worth: `python -m benchmarks.search.ablation`.

Plays five worlds with five seeds each, once as it is and once for each constant with another
value, and writes ablation.csv. A search that never reaches 99 % counts as 45 trials.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.search.guided import Guided
from benchmarks.search.replay import Replay, replay
from benchmarks.search.scenarios import make_world
from benchmarks.search.tables import Table, load_table
from benchmarks.search.tasks import ALL_WORLDS
from tuner.space import load_space

TABLE = Path(__file__).with_name("ablation.csv")
_COLUMNS = (
    "constant", "as_it_is", "here", "trials_to_99", "regret_12_percent", "worst_regret_12",
    "regret_40_percent", "worst_regret_40", "oom_percent",
)  # fmt: skip
WORLDS = ("pair", "dark", "own-17", "noise-15", "levels-30")
SEEDS, TRIALS, NEVER = range(5), 40, 45

OTHERS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "regression": {
        "PRIOR_TRIALS": (1.0, 16.0),
        "EFFECT": (2.0, 8.0),
        "SCALES": (np.ones(1),),
        "NOISES": (np.ones(1),),
    },
    "experience": {
        "LEAST_PROBABLE": (0.002, 0.1),
        "LEAST_SCATTER": (0.001, 0.02),
        "STALE_WEIGHT": (1.0,),
        "REFIT_GROWTH": (0.0, 0.1),
        "HIGHEST_RISK": (0.1, 0.5),
        "LEAST_GAIN": (0.0, 0.02),
    },
    "sampler": {
        "OOM_SHARE": (0.01, 0.04),
        "ADVANCE_TRIALS": (10, 100),
        "CLEARLY": (1.0, 10.0),
        "THROUGHPUT_WEIGHT": (0.0, 2.0),
        "DOUBT": (0.0, 1.0),
        "EXPLORES": (1, 10**6),
    },
    "goals": {"FAR": (2.0, 100.0)},
    "pool": {"RATE": (0.0, 4.0)},
}
"""Other values of each constant, by its module in `tuner.searches.guided`."""

Row = tuple[str, str, str]
Change = tuple[str, str, Any] | None


def play(table: Table, change: Change, world: str, seed: int) -> Replay:
    """One search with a constant changed in every module that has its name."""
    if change is not None:
        for module in OTHERS:
            place = import_module(f"tuner.searches.guided.{module}")
            if hasattr(place, change[1]):
                setattr(place, change[1], change[2])
    made = make_world(world, table, seed, ALL_WORLDS)
    return replay(made, Guided(table), trials=TRIALS, seed=seed)


def row(table: Table, change: Change) -> tuple[float, ...]:
    """Mean trials to 99 %, regret after 12 and 40 trials, worst of both, and share of OOM."""
    found = [play(table, change, world, seed) for world in WORLDS for seed in SEEDS]
    trials = np.mean([min(each.trials_to(0.99), NEVER) for each in found])
    after = [[each.regret[min(n, len(each.regret)) - 1] for each in found] for n in (12, TRIALS)]
    oom = sum(sum(each.oom) for each in found) / sum(len(each.oom) for each in found)
    early, late = after
    return float(trials), np.mean(early), max(early), np.mean(late), max(late), oom


def changes(only: str | None) -> Iterator[Change]:
    """No change, then every other value of every constant."""
    yield None
    for module, constants in OTHERS.items():
        for name, values in constants.items():
            if only is None or name in only.split(","):
                yield from ((module, name, value) for value in values)


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.ablation")
    parser.add_argument("--only", help="constants, separated by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    table = load_table(load_space("qlora27b"), "a100_80gb")
    every = list(changes(arguments.only))
    context = get_context("spawn")
    with (
        TABLE.open("w", encoding="utf-8", newline="") as file,
        ProcessPoolExecutor(arguments.jobs, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for change, found in zip(every, pool.map(partial(row, table), every), strict=True):
            names = ["all as they are", "", ""]
            if change is not None:
                module, name, value = change
                usual = getattr(import_module(f"tuner.searches.guided.{module}"), name)
                names = [name, *("..." if np.ndim(v) else f"{v:g}" for v in (usual, value))]
            trials, *shares = found
            line = [*names, f"{trials:.1f}", *(f"{100 * share:.1f}" for share in shares)]
            writer.writerow(line)
            print(*line, sep="  ", flush=True)


if __name__ == "__main__":
    main()
