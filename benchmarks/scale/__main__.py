"""`python -m benchmarks.scale`: what 10,000 trials and 200 workers cost the driver.

One search of `--trials` trials with `--workers` logical GPUs, then a short one for each number of
`--against` with the workers in shared processes, and for each of `--own` with a process per
worker, which shows what sharing leaves out. Writes a CSV and a plot, and says whether the time
stays flat.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import multiprocessing
import os
import platform
import sys
from pathlib import Path
from typing import get_type_hints

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil

from benchmarks.scale.in_ray import Row, run

FOLDER = Path(__file__).parent / "results"

FLAT, MOST_MS, MOST_MIB = 1.2, 50.0, 1536.0
"""What is asked: the time of a trial at the end against that at the 1,000th, its largest value,
and the memory of the driver."""
AROUND = 500
"""Trials before and after a point over which its time is averaged: what is learned anew from all
trials is learned at every fiftieth of them."""


def main() -> None:
    """Run, write, draw, and judge; exit code 1 where it is too slow, grows, or takes too much."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--against", type=int, nargs="*", default=[1, 10, 50, 100])
    parser.add_argument("--own", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--short", type=int, default=1000, help="trials of the short searches")
    parser.add_argument("--searcher", default="guided")
    parser.add_argument("--results", type=Path, default=FOLDER)
    parser.add_argument("--draw", action="store_true", help="draw and judge what is there")
    arguments = parser.parse_args()
    path = arguments.results / "scale.csv"
    if not arguments.draw:
        arguments.results.mkdir(parents=True, exist_ok=True)
        rows = _alone(arguments.trials, arguments.workers, arguments.searcher, False)
        for own, numbers in ((False, arguments.against), (True, arguments.own)):
            for workers in numbers:
                rows += _alone(arguments.short, workers, arguments.searcher, own)
        write(path, rows)
        (arguments.results / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")
    rows = read(path)
    from benchmarks.scale.plot import draw

    draw(rows, arguments.results / "scale.png", machine_line(arguments.results))
    sys.exit(0 if judge(rows) else 1)


def _alone(trials: int, workers: int, searcher: str, own: bool) -> list[Row]:
    """One search in a process of its own, so that each begins with the same memory."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(run, (trials, workers), {"searcher": searcher, "processes": own})


def write(path: Path, rows: list[Row]) -> None:
    """One line per window of trials."""
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
        table.writeheader()
        for row in rows:
            values = dataclasses.asdict(row)
            table.writerow(
                {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}
            )


def read(path: Path) -> list[Row]:
    """What `write` wrote."""
    types = get_type_hints(Row)
    with path.open(newline="") as file:
        return [Row(**{k: types[k](v) for k, v in line.items()}) for line in csv.DictReader(file)]


def machine() -> dict[str, str | int | float]:
    """What the times are of."""
    from importlib.metadata import version

    return {
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_before": round(os.getloadavg()[2], 2),
        "python": platform.python_version(),
        **{name: version(name) for name in ("ray", "optuna", "numpy")},
    }


def machine_line(folder: Path) -> str:
    """For below the plot."""
    found = json.loads((folder / "machine.json").read_text())
    return (
        f"{found['processor']}, {found['cpus']} CPUs, {found['memory_gib']} GiB; Python "
        f"{found['python']}, Ray {found['ray']}, Optuna {found['optuna']}"
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def longest(rows: list[Row]) -> list[Row]:
    """The rows of the search with the most trials."""
    most = max(rows, key=lambda row: row.trials)
    return [r for r in rows if (r.workers, r.processes) == (most.workers, most.processes)]


def at(rows: list[Row], trials: int) -> float:
    """Milliseconds of a trial around this one."""
    near = [r.driver_cpu_ms for r in rows if abs(r.trials - trials) <= AROUND]
    return float(np.mean(near))


def judge(rows: list[Row]) -> bool:
    """Print how the long search compares with what is asked; True where all is kept."""
    found = longest(rows)
    last = found[-1].trials
    if last < 1000 + 2 * AROUND:
        print(f"{last} trials are too few to say what grows; {1000 + 2 * AROUND} are not")
        return False
    start, end = at(found, 1000), at(found, last - AROUND)
    middle = [at(found, row.trials) for row in found if row.trials >= 1000 + AROUND]
    memory = max(row.resident_mib for row in found)
    print(
        f"{last} trials on {found[0].workers} workers: {start:.1f} ms of the driver's CPU time a "
        f"trial around the 1,000th, {end:.1f} around the last 1,000 ({end / start - 1:+.0%}, "
        f"asked: at most {FLAT - 1:+.0%}), at most {max(middle):.1f} between (asked: "
        f"{MOST_MS:.0f}); {memory:.0f} MiB at most (asked: {MOST_MIB:.0f})"
    )
    return end <= FLAT * start and max(middle) <= MOST_MS and memory <= MOST_MIB


if __name__ == "__main__":
    main()
