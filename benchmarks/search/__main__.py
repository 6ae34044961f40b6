"""`python -m benchmarks.search`: replay searches where the truth is known, and compare them.

Rows go to a CSV file as they come; a replay that the file has is not repeated, so that a run can
be broken off, continued, and done in parts.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

# Before numpy is imported. The matrices are small, and threads only get into each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import optuna

from benchmarks.search.baselines import (
    BatchFinder,
    Halving,
    Random,
    optuna_searcher,
    shortlisted_searcher,
)
from benchmarks.search.guided import Guided
from benchmarks.search.measured import measured_worlds
from benchmarks.search.replay import Searcher, replay
from benchmarks.search.report import Row, append, by_world, overview, read, row_of, verdicts
from benchmarks.search.tables import Table, tables
from benchmarks.search.worlds import WORLDS, World, make_world

Maker = Callable[[Table, int, int], Searcher]
"""Makes a searcher from a table, a seed and the number of trials."""


def _optuna(name: str) -> Maker:
    return lambda table, seed, trials: optuna_searcher(name, table, seed=seed, trials=trials)


SEARCHERS: Mapping[str, Maker] = {
    "guided": lambda table, seed, trials: Guided(table, seed=seed),
    "tpe": _optuna("tpe"),
    "nsga2": _optuna("nsga2"),
    "gp": _optuna("gp"),
    "shortlist": lambda table, seed, trials: shortlisted_searcher(
        "tpe", table, seed=seed, trials=trials
    ),
    "random": lambda table, seed, trials: Random(table, seed=seed),
    "asha": lambda table, seed, trials: Halving(table, seed=seed),
    "halving": lambda table, seed, trials: BatchFinder(table, seed=seed, halving=True),
    "doubling": lambda table, seed, trials: BatchFinder(table, seed=seed, halving=False),
}

TRIALS: Mapping[str, int] = {"guided": 60, "shortlist": 60, "tpe": 150, "gp": 60}
"""Trials of a replay. `guided` has its answer by then; `tpe` and `gp` take a tenth of a second for
each decision, and longer the more trials there are."""
OTHER_TRIALS = 300


def main() -> None:
    """Run the benchmark."""
    arguments = _arguments()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if not arguments.report_only:
        known = {(r.table, r.world, r.searcher, r.seed) for r in read(arguments.csv)}
        if arguments.measured:
            for world in measured_worlds(fresh=arguments.fresh):
                for name in arguments.searcher or SEARCHERS:
                    _run(world.table, world, name, arguments, known)
        for table in (
            []
            if arguments.measured
            else tables(arguments.space, arguments.gpu, fresh=arguments.fresh)
        ):
            for world in arguments.world or WORLDS:
                for name in arguments.searcher or SEARCHERS:
                    _run(table, world, name, arguments, known)
    rows = read(arguments.csv)
    text = f"{verdicts(rows)}\n\n{overview(rows)}\n\n{by_world(rows, 'guided')}\n"
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)


def _run(
    table: Table,
    world: str | World,
    name: str,
    arguments: argparse.Namespace,
    known: set[tuple[str, str, str, int]],
) -> None:
    started = time.monotonic()
    trials = arguments.trials or TRIALS.get(name, OTHER_TRIALS)
    world_name = world if isinstance(world, str) else world.name
    rows: list[Row] = []
    for seed in range(arguments.seeds):
        if (table.name, world_name, name, seed) in known:
            continue
        searcher = SEARCHERS[name](table, seed, trials)
        truth = make_world(world, table, seed) if isinstance(world, str) else world
        found = replay(truth, searcher, trials=trials, seed=seed)
        rows.append(row_of(table.name, world_name, name, seed, found))
        append(arguments.csv, rows[-1:])
    if rows:
        print(f"{table.name}, {world_name}, {name}: {time.monotonic() - started:.0f} s", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    several = partial(parser.add_argument, action="append", default=[])
    several("--space", help="a search space; all shipped ones unless named")
    several("--gpu", help="a GPU type; those of the space unless named")
    several("--world", choices=list(WORLDS))
    several("--searcher", choices=list(SEARCHERS))
    parser.add_argument("--measured", action="store_true", help="published runs, not spaces")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, help="trials of each replay")
    parser.add_argument("--csv", type=Path, default=Path("search-benchmark.csv"))
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--fresh", action="store_true", help="predict the spaces anew")
    parser.add_argument("--report-only", action="store_true", help="only read the CSV file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
