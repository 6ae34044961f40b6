"""Tables of outcomes that were really measured, from `benchmarks/accuracy/measured_runs.csv`.

Each is the published runs of one model on one GPU, a configuration once. They all fitted, so a
smaller GPU stands in: one that a third of them would not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.accuracy.harnesses import Case, express
from benchmarks.accuracy.predictions import predict_all
from benchmarks.accuracy.rows import read_rows
from benchmarks.search.scenarios import Scenario
from benchmarks.search.tables import (
    DEVICE,
    LOADED,
    SAMPLES_PER_S,
    STEP,
    Floats,
    Table,
    cache_folder,
)
from tuner.core.records import Configuration

MARGIN_FRACTION = 0.03
"""As `tuner search` has it."""

FITTING = 2 / 3
"""Share of the runs that fits the GPU that stands in."""

FEWEST = 10
"""Configurations below which there is nothing to search."""


def measured_worlds(*, processes: int = 1, fresh: bool = False) -> list[Scenario]:
    """A world without noise for each group of enough runs; the truth is what was measured."""
    groups: dict[tuple[str, str], dict[str, Case]] = {}
    for row in read_rows():
        case = express(row)
        if isinstance(case, Case) and case.measured.step_s and case.measured.allocated:
            group = groups.setdefault((case.model, case.gpu), {})
            group.setdefault(case.configuration.key, case)
    worlds = []
    for (model, gpu), cases in groups.items():
        if len(cases) >= FEWEST:
            name = f"measured {model.split('/')[-1]} on {gpu}"
            worlds.append(_world(name, list(cases.values()), processes, fresh))
    return worlds


def _world(name: str, cases: Sequence[Case], processes: int, fresh: bool) -> Scenario:
    names = sorted({name for case in cases for name in case.configuration})
    lacking = dict.fromkeys(names, "")  # what a run without adapters doesn't have
    configurations = tuple(Configuration({**lacking, **one.configuration}) for one in cases)
    arrays = _predictions(name, cases, processes, fresh)
    size = np.array([case.measured.allocated for case in cases], dtype=float)
    step_s = np.array([case.measured.step_s for case in cases], dtype=float)
    limit = float(np.quantile(size, FITTING)) / (1 - MARGIN_FRACTION)
    table = Table(
        name=name,
        configurations=configurations,
        knobs=tuple(_varying(configurations, names)),
        baseline=None,
        arrays=arrays,
        limit_bytes=limit,
        margin_bytes=MARGIN_FRACTION * limit,
    )
    return replace(
        Scenario(name, table, _samples(cases) / step_s, size), speed_noise=0.0, memory_noise=0.0
    )


def _varying(configurations: Sequence[object], names: Sequence[str]) -> list[str]:
    """Knobs of the group: what varies, less what follows from the rest."""
    derived = {"lora_alpha", "grad_accum"}
    values = {name: {c.get(name) for c in configurations} for name in names}  # type: ignore[attr-defined]
    return [name for name in names if len(values[name]) > 1 and name not in derived]


def _samples(cases: Sequence[Case]) -> Floats:
    """Sequences of one optimizer step."""
    found = []
    for case in cases:
        c = case.configuration
        found.append(int(str(c["micro_batch"])) * int(str(c.get("grad_accum", 1))))
    return np.array(found, dtype=float)


def _predictions(
    name: str, cases: Sequence[Case], processes: int, fresh: bool
) -> dict[str, Floats]:
    path = cache_folder() / f"{name.replace(' ', '-').replace('/', '-')}-{len(cases)}.npz"
    if fresh or not path.exists():
        print(f"predicting {len(cases)} runs of {name} ...", flush=True)
        found = [p for _, p in sorted(predict_all(cases, processes=processes), key=lambda x: x[0])]
        step_s = np.array([p.step_s for p in found])
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            path,
            **{
                SAMPLES_PER_S: _samples(cases) / step_s,
                DEVICE: np.array([p.allocated for p in found], dtype=float),
                LOADED: np.array([p.loaded for p in found], dtype=float),
                STEP: step_s,
            },
        )
    with np.load(path) as stored:
        return {key: stored[key] for key in stored.files}
