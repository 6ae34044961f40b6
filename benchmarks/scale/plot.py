"""Draws what trials cost the driver: against trials, and against workers."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.scale.in_ray import Row


def draw(rows: list[Row], path: Path, machine: str) -> None:
    """Two plots side by side, as a PNG."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    most = max(rows, key=lambda row: row.trials)
    long = [r for r in rows if (r.workers, r.processes) == (most.workers, most.processes)]
    trials = [row.trials for row in long]
    left.plot(trials, [row.driver_cpu_ms for row in long], label="driver, all of it")
    left.plot(trials, [row.decision_ms for row in long], label="of that, decisions")
    left.axhline(50, color="gray", linestyle=":", linewidth=1)
    left.set(xlabel=f"trials ({most.workers} workers)", ylabel="ms of CPU time per trial")
    memory = left.twinx()
    memory.plot(trials, [row.resident_mib for row in long], color="tab:green", linestyle="--",
                label="memory of the driver")  # fmt: skip
    memory.set(ylabel="MiB", ylim=(0, None))
    lines = [*left.get_lines()[:2], *memory.get_lines()]
    left.legend(lines, [str(line.get_label()) for line in lines], loc="lower right")
    for processes, name in (("shared", "in shared processes"), ("own", "a process per worker")):
        points = against_workers(rows, processes)
        right.plot(*zip(*points, strict=True), marker="o", label=name) if points else None
    right.set(xlabel="workers", ylabel="ms of CPU time per trial", xscale="log")
    if right.get_lines():
        right.legend()
    right.axhline(50, color="gray", linestyle=":", linewidth=1)
    for axes in (left, right):
        axes.set_ylim(0, max(55, axes.get_ylim()[1]))
        axes.spines[["top"]].set_visible(False)
    figure.text(0.01, 0.01, machine, fontsize=7, color="gray")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def against_workers(rows: list[Row], processes: str) -> list[tuple[int, float]]:
    """Workers, and milliseconds per trial from the 500th to the 1,000th."""
    mine = [row for row in rows if row.processes == processes and 500 < row.trials <= 1000]
    return [
        (workers, float(np.mean([row.driver_cpu_ms for row in mine if row.workers == workers])))
        for workers in sorted({row.workers for row in mine})
    ]
