"""`python -m benchmarks.search.overhead`: seconds of a decision with many trials in the study.

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
import optuna

from benchmarks.search.guided import pool_of
from benchmarks.search.scenarios import Trial, make_world
from benchmarks.search.tables import DEVICE, Table, load_table
from tuner.searches.guided.sampler import GuidedSampler
from tuner.space import load_space

DECISIONS = 40


def main() -> None:
    """Print the time of a decision after each of several numbers of trials."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.overhead")
    parser.add_argument("--space", default="qlora27b")
    parser.add_argument("--gpu", default="a100_80gb")
    parser.add_argument("--trials", type=int, nargs="+", default=[10, 100, 1000])
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = load_table(load_space(arguments.space), arguments.gpu)
    # As if everything fitted: else nothing would be left to propose after a few hundred trials.
    table = dataclasses.replace(table, limit_bytes=2 * table.arrays[DEVICE].max())
    print(f"{len(table.configurations)} candidates; milliseconds of CPU time per decision")
    for trials in arguments.trials:
        found = 1e3 * np.array(decisions_s(table, trials))
        print(
            f"{trials:5d} trials in the study: mean {found.mean():.1f}, median "
            f"{np.median(found):.1f}, 95th percentile {np.quantile(found, 0.95):.1f}"
        )


def decisions_s(table: Table, trials: int) -> list[float]:
    """CPU seconds of each of some decisions, the first of them after `trials` trials."""
    world, rng = make_world("levels-20", table, 0), np.random.default_rng(0)
    sampler = GuidedSampler(pool_of(table), seed=0)
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    pool = sampler.pool
    places = {tuple(sorted(p.items())): i for i, p in enumerate(pool.parameters)}
    for place in rng.permutation(len(pool.parameters))[:trials]:
        study.add_trial(
            optuna.trial.create_trial(
                params=dict(pool.parameters[place]),
                distributions=dict(pool.distributions),
                values=_values(table, world.run(int(place), rng)),
            )
        )
    trial = study.ask(dict(pool.distributions))
    found = []
    for _ in range(DECISIONS):
        place = places[tuple(sorted(trial.params.items()))]
        values = _values(table, world.run(place, rng))
        started = time.process_time()
        study.tell(trial, values)
        trial = study.ask(dict(pool.distributions))
        found.append(time.process_time() - started)
    return found


def _values(table: Table, trial: Trial) -> tuple[float, float]:
    if trial.samples_per_s is None or trial.device_bytes is None:
        return 0.0, 2 * table.limit_bytes
    return trial.samples_per_s, trial.device_bytes


if __name__ == "__main__":
    main()
