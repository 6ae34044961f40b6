"""`python -m benchmarks.search.overhead`: seconds of a decision with many trials told.

A decision is telling the study of one trial and asking it for the next, with all that the
sampler learns in between.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.search.guided import pool_of
from benchmarks.search.scenarios import Trial, make_world
from benchmarks.search.tables import DEVICE, Table, load_table
from tuner.searches.guided.sampler import Guided
from tuner.space import load_space

DECISIONS = 40


def main() -> None:
    """Print the time of a decision after each of several numbers of trials."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.overhead")
    parser.add_argument("--space", default="qlora27b")
    parser.add_argument("--gpu", default="a100_80gb")
    parser.add_argument("--trials", type=int, nargs="+", default=[10, 100, 1000])
    arguments = parser.parse_args()
    table = load_table(load_space(arguments.space), arguments.gpu)
    # As if everything fitted: else nothing would be left to propose after a few hundred trials.
    table = dataclasses.replace(table, limit_bytes=2 * table.arrays[DEVICE].max())
    print(f"{len(table.configurations)} candidates; milliseconds of CPU time per decision")
    for trials in arguments.trials:
        found = 1e3 * np.array(decisions_s(table, trials))
        print(
            f"{trials:5d} trials told: mean {found.mean():.1f}, median "
            f"{np.median(found):.1f}, 95th percentile {np.quantile(found, 0.95):.1f}"
        )


def decisions_s(table: Table, trials: int) -> list[float]:
    """CPU seconds of each of some decisions, the first of them after `trials` trials."""
    world, rng = make_world("levels-20", table, 0), np.random.default_rng(0)
    sampler = Guided(pool_of(table))
    for place in rng.permutation(len(sampler.pool.candidates))[:trials]:
        sampler.end(int(place), _values(table, world.run(int(place), rng)))
    chosen = sampler.choose()
    found = []
    for _ in range(DECISIONS):
        assert chosen is not None
        values = _values(table, world.run(chosen, rng))
        started = time.process_time()
        sampler.end(chosen, values)
        chosen = sampler.choose()
        found.append(time.process_time() - started)
    return found


def _values(table: Table, trial: Trial) -> tuple[float, float]:
    if trial.samples_per_s is None or trial.device_bytes is None:
        return 0.0, 2 * table.limit_bytes
    return trial.samples_per_s, trial.device_bytes


if __name__ == "__main__":
    main()
