"""`python -m benchmarks.search`: replay searches where the truth is known, and compare them.

Without options: every shipped space on each of its GPUs, and the published runs. Rows go to a CSV
file as they come; a replay that the file has is not repeated, so that a run can be broken off,
continued, and done in parts.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from benchmarks.search.measured import measured_worlds
from benchmarks.search.report import append, by_world, overview, read, verdicts
from benchmarks.search.scenarios import Scenario
from benchmarks.search.tables import Table, tables
from benchmarks.search.tasks import ALL_WORLDS, SEARCHERS, Task, run_task
from benchmarks.search.worlds import scenario_of

TRIALS: Mapping[str, int] = {
    "guided": 40,
    "layers": 40,
    "shortlist": 40,
    "tpe": 150,
    "gp": 60,
    "botorch": 40,
    "nsga2": 150,
}
"""Trials of a replay. `guided` has its answer by then; `tpe` and `gp` take a tenth of a second for
each decision, and longer the more trials there are."""
OTHER_TRIALS = 300

MOST_SEEDS = 20
SEEDS: Mapping[str, int] = {"nsga2": 5, "tpe": 3, "shortlist": 5, "gp": 1, "botorch": 1}
"""Of those that cost CPU time; the others run `MOST_SEEDS`."""

GP_WORLDS = ("levels-20",)
"""A decision of the Gaussian process takes seconds."""

ON_REQUEST = ("botorch", "gp-front", "tpe-front", "nsga2-front")
"""Run only where `--searcher` names them. `botorch` needs `pip install botorch`."""


def main() -> None:
    """Run the benchmark."""
    arguments = _arguments()
    if not arguments.report_only:
        _run(list(_tasks(arguments)), arguments)
    rows = read(arguments.csv)
    print(verdicts(rows), overview(rows), by_world(rows, "guided"), sep="\n\n")


def _tasks(arguments: argparse.Namespace) -> Iterator[Task]:
    """What is to be run and is not in the file yet."""
    known = {(r.table, r.world, r.searcher, r.seed) for r in read(arguments.csv)}
    for table, world in _pairs(arguments):
        for name in arguments.searcher or SEARCHERS:
            if name in arguments.skip or (name in ON_REQUEST and not arguments.searcher):
                continue
            if name == "gp" and not arguments.searcher and world not in GP_WORLDS:
                continue
            kind = name.removesuffix("-front")
            task = Task(table, world, name, (), arguments.trials or TRIALS.get(kind, OTHER_TRIALS))
            seeds = range(arguments.seeds or SEEDS.get(kind, MOST_SEEDS))
            left = [s for s in seeds if (table.name, task.world_name, name, s) not in known]
            if left:
                yield replace(task, seeds=tuple(left))


def _pairs(arguments: argparse.Namespace) -> list[tuple[Table, str | Scenario]]:
    pairs: list[tuple[Table, str | Scenario]] = []
    if not arguments.measured:
        found = tables(arguments.space, arguments.gpu, fresh=arguments.fresh)
        worlds = arguments.world or ALL_WORLDS
        pairs = [(table, _world(world, table)) for table in found for world in worlds]
    if not (arguments.space or arguments.gpu or arguments.world):
        pairs += [(world.table, world) for world in measured_worlds(fresh=arguments.fresh)]
    return pairs


def _world(name: str, table: Table) -> str | Scenario:
    """A world by its name, or that of somebody's function in this table."""
    if ":" not in name:
        return name
    module, _, function = name.partition(":")
    return scenario_of(getattr(import_module(module), function), table, name=name)


def _world_name(text: str) -> str:
    if text in ALL_WORLDS or ":" in text:
        return text
    raise argparse.ArgumentTypeError(
        f"no world {text!r}; there are {', '.join(ALL_WORLDS)}, and MODULE:FUNCTION of your own"
    )


def _run(tasks: Sequence[Task], arguments: argparse.Namespace) -> None:
    started = time.monotonic()
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(run_task, task): task for task in tasks}
        for number, future in enumerate(as_completed(waiting), start=1):
            task = waiting[future]
            append(arguments.csv, future.result())
            print(
                f"{number}/{len(tasks)}, {time.monotonic() - started:.0f} s: "
                f"{task.table.name}, {task.world_name}, {task.searcher}",
                flush=True,
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    several = partial(parser.add_argument, action="append", default=[])
    several("--space", help="a search space; all shipped ones unless named")
    several("--gpu", help="a GPU type; those of the space unless named")
    several("--world", type=_world_name, help="a name, or MODULE:FUNCTION of your own")
    several("--searcher", choices=list(SEARCHERS))
    several("--skip", choices=list(SEARCHERS), help="a searcher to leave out")
    parser.add_argument("--measured", action="store_true", help="published runs, no spaces")
    parser.add_argument("--seeds", type=int, help="for every searcher; else 20, and fewer of some")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes [all cores]")
    parser.add_argument("--trials", type=int, help="trials of each replay")
    parser.add_argument("--csv", type=Path, default=Path("search-benchmark.csv"))
    parser.add_argument("--fresh", action="store_true", help="predict the spaces anew")
    parser.add_argument("--report-only", action="store_true", help="only read the CSV file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
