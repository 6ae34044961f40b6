"""Kills and adds nodes at random while searches of three GPU types run, and checks what comes.

    python -m benchmarks.chaos --minutes 5 --seed 3

Each round searches the whole space of three types. After each event every journal must be whole,
and at the end of the round each configuration must have come to one record and each front must be
the true one.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.chaos.checks import Journals, begun, check_end, meanwhile, searched
from benchmarks.chaos.nodes import ChaosCluster, chaos_cluster

TYPES = ("a6000", "l4", "h100_sxm")
MOST_NODES = 2
"""Of each type, beside those that are being lost: more is too much for two processor cores."""


def main() -> None:
    """Print what happened in each round, and how many of each event there were."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trial-seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)  # noqa: S311 - an experiment, not a secret
    happened: Counter[str] = Counter()
    rounds = 0
    with chaos_cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        for gpu_id in TYPES:
            cluster.add(gpu_id)
        until_s = time.monotonic() + 60 * arguments.minutes
        while not rounds or time.monotonic() < until_s:
            rounds += 1
            round_(cluster, Path(folder) / str(rounds), rng, arguments.trial_seconds, happened)
    events = ", ".join(f"{count} x {name}" for name, count in sorted(happened.items()))
    print(f"{rounds} rounds, each with three true fronts, nothing lost and nothing twice: {events}")


def round_(
    cluster: ChaosCluster,
    folder: Path,
    rng: random.Random,
    trial_s: float,
    happened: Counter[str],
) -> None:
    """One search of all types, with events until it ends."""
    journals = Journals(folder, TYPES)

    def events() -> None:
        while journals.wait_for_any(rng.randrange(1, 6)):
            name = event(cluster, rng)
            happened[name] += 1
            journals.check_valid()
            print(f"  {name}; records: {dict(journals.counts)}", flush=True)

    started_s = time.monotonic()
    with meanwhile(events):
        results = searched(
            journals, cluster.address, sleep_s=trial_s, seed=rng.randrange(1000), node_wait_s=120.0
        )
    check_end(journals, results)
    cluster.repair()
    again = sum(begun(journals, g).total() - len(begun(journals, g)) for g in TYPES)
    print(
        f"round of {time.monotonic() - started_s:.0f} s: "
        f"{sum(len(r.records) for r in results)} trials, {again} runs lost and run again, "
        f"warnings: {sum(len(r.warnings) for r in results)}",
        flush=True,
    )


def event(cluster: ChaosCluster, rng: random.Random) -> str:
    """One thing that happens, and its name. Each type keeps, or soon gets, a node."""
    gpu_id = rng.choice(TYPES)
    here = cluster.alive(gpu_id)
    if len(here) < MOST_NODES:
        cluster.add(gpu_id)
        return "node added"
    happenings: dict[str, Callable[..., None]] = {
        "node killed": cluster.kill,
        "node frozen": cluster.freeze,
        "node removed": cluster.remove,
        "GPU lost": cluster.lose_gpu,
    }
    name = rng.choice(list(happenings))
    happenings[name](rng.choice(here))
    return name


if __name__ == "__main__":
    main()
