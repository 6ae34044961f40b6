"""Worlds whose errors do not come from knobs: other hardware, other software, things that break.

`TUNING` were looked at while the search was changed for them; `HELD_OUT` were run at the end only,
as was the space `qlora4b` with all of them.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.search.scenarios import CRASHES, Maker, _fragmentation, _is_number, _moving_share
from benchmarks.search.tables import DEVICE, SAMPLES_PER_S, STEP, Floats, Table, load_table
from tuner.space import load_space

Errors = tuple[Floats, Floats, Mapping[str, object]]

CHECKPOINTING = "gradient_checkpointing"
OTHERS: Mapping[str, str] = {"a6000": "a100_80gb", "a100_80gb": "a6000"}
"""The GPU type whose predictions are another one's truth; that of any other is the A6000's."""


def _crashing(table: Table, rng: np.random.Generator) -> Errors:
    """One value of the configuration that is predicted to be the fastest always fails."""
    fits = table.arrays[DEVICE] <= table.limit_bytes - table.margin_bytes
    best = int(np.argmax(np.where(fits, table.arrays[SAMPLES_PER_S], 0.0)))
    hits = []
    for knob in table.knobs:
        column = table.column(knob)
        hit = np.array([value == column[best] for value in column])
        if not _is_number(table, knob) and (fits & ~hit).sum() >= 5:
            hits.append(hit)
    return *_as_told(table, rng), {CRASHES: hits[rng.integers(len(hits))]}


def _reentrant(table: Table, rng: np.random.Generator) -> Errors:
    """Checkpointing saves more than was told: 30 % of what is not weights."""
    return *_moving_times(table, rng, checkpointed=True, factor=0.7), {}


def _dark(table: Table, rng: np.random.Generator) -> Errors:
    """Runs without checkpointing take half of what was told beside weights."""
    return *_moving_times(table, rng, checkpointed=False, factor=0.5), {}


def _underestimated(table: Table, rng: np.random.Generator) -> Errors:
    """One level of a knob takes a quarter more of what is not weights than was told."""
    words = [knob for knob in table.knobs if not _is_number(table, knob)]
    column = table.column(words[rng.integers(len(words))])
    level = sorted(set(column), key=str)[rng.integers(len(set(column)))]
    hit = np.array([value == level for value in column])
    speed, memory = _as_told(table, rng)
    return speed, memory + np.log1p(0.25 * hit * _moving_share(table)), {}


def _other_gpu(table: Table, rng: np.random.Generator) -> Errors:
    """Configurations are as fast, to one another, as they are predicted to be on another GPU."""
    space, _, gpu = table.name.partition(" on ")
    other = load_table(load_space(space), OTHERS.get(gpu, "a6000"))
    known = zip(other.configurations, other.arrays[SAMPLES_PER_S], strict=True)
    there = {configuration.key: float(rate) for configuration, rate in known}
    own = table.arrays[SAMPLES_PER_S]
    rates = np.array([there.get(c.key, np.nan) for c in table.configurations])
    speed = np.log(rates / own)
    speed = np.where(np.isnan(speed), 0.0, speed - np.nanmedian(speed))
    return speed + 0.01 * rng.normal(size=len(own)), _as_told(table, rng)[1], {}


def _host_bound(table: Table, rng: np.random.Generator) -> Errors:
    """No step is faster than the host issues its work, which half of the steps would be."""
    step_s = table.arrays[STEP]
    floor_s = np.quantile(step_s, rng.uniform(0.3, 0.6))
    return np.log(step_s / np.maximum(step_s, floor_s)), _as_told(table, rng)[1], {}


def _fragments(table: Table, rng: np.random.Generator) -> Errors:
    """The allocator wastes up to 15 % of what is not weights, by configuration."""
    return np.zeros(len(table.configurations)), _fragmentation(table, rng, 0.15), {}


def _quarter_slower(table: Table, rng: np.random.Generator) -> Errors:
    """A quarter of all configurations, drawn at random, is a fifth slower."""
    slow = rng.random(len(table.configurations)) < 0.25
    return np.log(0.8) * slow, _as_told(table, rng)[1], {}


def _scattered(table: Table, rng: np.random.Generator) -> Errors:
    """Every configuration is off by a tenth of its own, which no other tells."""
    return 0.1 * rng.normal(size=len(table.configurations)), _as_told(table, rng)[1], {}


def _scaled(least: float, most: float) -> Maker:
    """Differences of logarithms from the median are this share less than predicted."""

    def make(table: Table, rng: np.random.Generator) -> Errors:
        log = np.log(table.arrays[SAMPLES_PER_S])
        speed = -rng.uniform(least, most) * (log - np.median(log))
        return speed, _as_told(table, rng)[1], {}

    return make


_compressed = _scaled(1 / 3, 2 / 3)
"""The order is as predicted, but what is faster is so by a third less to two thirds less."""

_contradicted = _scaled(4 / 3, 2)
"""What is predicted to be faster is slower, by a third of the difference to all of it."""


@functools.cache
def _published_errors() -> Floats:
    """The logarithms of measured over predicted throughput of published runs.

    The file has predicted over measured steps, less 1.
    """
    file = Path(__file__).parents[1] / "accuracy/predictions.csv"
    rows = csv.DictReader(file.read_text("utf-8").splitlines())
    off = [row["step"].strip("%") for row in rows if row["step"].strip()]
    return np.asarray(np.log1p(np.array(off, dtype=float) / 100))


def _published(table: Table, rng: np.random.Generator) -> Errors:
    """Steps are off as those of published runs are: by values without an order, and by chance."""
    found = _published_errors()
    words = [knob for knob in table.knobs if not _is_number(table, knob)]
    keys = list(zip(*map(table.column, words), strict=True))
    drawn = {key: rng.choice(found) for key in sorted(set(keys), key=str)}
    own = 0.3 * rng.choice(found, size=len(keys))
    return np.array([drawn[key] for key in keys]) + own, _as_told(table, rng)[1], {}


def _as_told(table: Table, rng: np.random.Generator) -> tuple[Floats, Floats]:
    return np.zeros(len(table.configurations)), _fragmentation(table, rng, 0.01)


def _moving_times(
    table: Table, rng: np.random.Generator, *, checkpointed: bool, factor: float
) -> tuple[Floats, Floats]:
    on = np.array([bool(c.get(CHECKPOINTING)) for c in table.configurations])
    speed, memory = _as_told(table, rng)
    less = (factor - 1.0) * (on == checkpointed) * _moving_share(table)
    return speed, memory + np.log1p(less)


TUNING: Mapping[str, Maker] = {
    "crashing": _crashing,
    "reentrant": _reentrant,
    "dark": _dark,
    "underestimated": _underestimated,
    "scattered": _scattered,
    "compressed": _compressed,
    "contradicted": _contradicted,
    "published": _published,
}
HELD_OUT: Mapping[str, Maker] = {
    "other-gpu": _other_gpu,
    "host-bound": _host_bound,
    "fragments": _fragments,
    "quarter-slower": _quarter_slower,
}
STRUCTURAL: Mapping[str, Maker] = {**TUNING, **HELD_OUT}
