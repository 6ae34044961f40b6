"""Worlds in which the truth is known, and is not what the searcher was told.

Each takes a table of predictions and makes another truth of it. The errors are made of other
parts than the searcher's own model of them: random effects of knob levels and of pairs of
levels, curves over the micro-batch, shares of memory, heavy-tailed noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.search.tables import DEVICE, LOADED, SAMPLES_PER_S, STEP, Floats, Table

START_S = 8.0
"""Start of a process and import of its libraries (4.1 s for the imports alone, design 4.6)."""

LOAD_BYTES_PER_S = 1.5e9
"""Reading and quantising weights: an ordinary NVMe drive through the CPU."""

TIMED_S, WARMUP_STEPS, MIN_STEPS = 20.0, 2, 3
"""As `tuner.trial.base.MeasureOptions` has them."""

BATCH = "micro_batch"


@dataclass(frozen=True, slots=True)
class Trial:
    """What one trial came to. The numbers are None when it ran out of memory, or failed."""

    oom: bool
    samples_per_s: float | None
    device_bytes: float | None
    seconds: float
    failed: bool = False


@dataclass(frozen=True)
class Scenario:
    """The truth about every entry of a table, and how trials scatter around it."""

    name: str
    table: Table
    samples_per_s: Floats
    device_bytes: Floats
    speed_noise: float = 0.01
    memory_noise: float = 0.002
    outliers: float = 0.0
    """Share of trials that are slowed down by something of their own."""
    outlier: float = -0.15
    """How much slower these are, as a logarithm."""
    crashes: NDArray[np.bool_] | None = None
    """Which entries fail with an error that has nothing to do with memory; None for none."""

    @property
    def usable_bytes(self) -> float:
        """Memory that a recommended configuration may take."""
        return self.table.limit_bytes - self.table.margin_bytes

    @property
    def feasible(self) -> np.ndarray:
        """Which entries truly run, and fit with the margin."""
        fits = self.device_bytes <= self.usable_bytes
        return fits if self.crashes is None else fits & ~self.crashes

    @property
    def load_s(self) -> Floats:
        """Seconds until the first step."""
        return START_S + self.table.arrays[LOADED] / LOAD_BYTES_PER_S

    def seconds(self, index: int, steps: int | None = None) -> float:
        """What a trial takes that does not run out of memory."""
        step_s = self.table.arrays[STEP][index] * (
            self.table.arrays[SAMPLES_PER_S][index] / self.samples_per_s[index]
        )
        timed_s = max(TIMED_S, MIN_STEPS * step_s) if steps is None else (steps - 1) * step_s
        warmup = WARMUP_STEPS if steps is None else 1
        return float(self.load_s[index] + warmup * step_s + timed_s)

    def run(self, index: int, rng: np.random.Generator, steps: int | None = None) -> Trial:
        """Run entry `index`, for few `steps` or for as many as are usual."""
        size = self.device_bytes[index] * np.exp(self.memory_noise * abs(rng.normal()))
        noise = self.speed_noise * rng.normal()
        if rng.random() < self.outliers:
            noise += self.outlier
        if steps is not None:
            noise += 0.03 * rng.normal()  # a step or two scatter more than a timed window
        if self.crashes is not None and self.crashes[index]:
            return Trial(False, None, None, float(self.load_s[index]), failed=True)
        if size > self.table.limit_bytes:
            return Trial(True, None, None, float(self.load_s[index]))
        speed = self.samples_per_s[index] * np.exp(noise)
        return Trial(False, float(speed), float(size), self.seconds(index, steps))


Maker = Callable[[Table, np.random.Generator], tuple[Floats, Floats, Mapping[str, Any]]]
"""Makes log(true / predicted) of speed and of memory, and what else of the scenario differs."""

CRASHES = "crashes"


def make_world(
    name: str, table: Table, seed: int, worlds: Mapping[str, Maker] | None = None
) -> Scenario:
    """One draw of a kind of world, in which at least a few configurations fit."""
    for attempt in itertools.count():
        rng = np.random.default_rng([seed, attempt, *name.encode()])
        speed, memory, noise = (worlds or WORLDS)[name](table, rng)
        world = Scenario(
            name=name,
            table=table,
            samples_per_s=table.arrays[SAMPLES_PER_S] * np.exp(speed),
            device_bytes=table.arrays[DEVICE] * np.exp(memory),
            **noise,
        )
        if world.feasible.sum() >= min(5, len(table.configurations)):
            return world
        if attempt > 100:
            raise ValueError(f"in no world {name!r} does anything of {table.name} fit")
    raise AssertionError


# -- errors ---------------------------------------------------------------------------------


def _exact(table: Table, rng: np.random.Generator) -> tuple[Floats, Floats, Mapping[str, float]]:
    """The prediction is right; trials scatter by 1 %."""
    nothing = np.zeros(len(table.configurations))
    return nothing, nothing, {}


def _levels(error: float) -> Maker:
    """Speed is wrong by `error` and memory by a third of it (root mean square over the table)."""

    def make(table: Table, rng: np.random.Generator) -> tuple[Floats, Floats, Mapping[str, float]]:
        speed = _mixture(table, rng, shared=0.35, levels=0.4, curve=0.15, pairs=0.09, own=0.01)
        memory = _mixture(table, rng, shared=0.4, levels=0.3, curve=0.2, pairs=0.09, own=0.01)
        size = np.log1p(error)
        return size * speed, size / 3 * memory + _fragmentation(table, rng, 0.01), {}

    return make


def _curve(table: Table, rng: np.random.Generator) -> tuple[Floats, Floats, Mapping[str, float]]:
    """Matmuls reach their speed at other batches than predicted; 20 to 35 % at the ends."""
    batch = _numbers(table, BATCH)
    half = rng.uniform(0.2, 2.0)
    speed = np.log(batch / (batch + half)) - np.log(4 / (4 + half))
    speed *= rng.choice([-1.0, 1.0])
    return speed, _fragmentation(table, rng, 0.01), {}


def _fragmented(table: Table, rng: np.random.Generator) -> tuple[Floats, Floats, Mapping]:
    """The allocator wastes a tenth of what is not weights, differently for each configuration."""
    speed, _, _ = _levels(0.1)(table, rng)
    return speed, _fragmentation(table, rng, 0.10), {}


def _activations(table: Table, rng: np.random.Generator) -> tuple[Floats, Floats, Mapping]:
    """What is not weights is 30 % more, or less, than predicted."""
    speed, _, _ = _levels(0.1)(table, rng)
    moving = _moving_share(table)
    memory = np.log1p(rng.choice([-0.3, 0.3]) * moving)
    return speed, memory + _fragmentation(table, rng, 0.01), {}


def _misjudged(table: Table, rng: np.random.Generator) -> tuple[Floats, Floats, Mapping]:
    """A mechanism takes 1.7 times as long as predicted, or one level of a knob does 1.5 times."""
    speed, memory, _ = _levels(0.1)(table, rng)
    kinds = [share for share in table.kinds.values() if share.max() > 0.1]
    words = [knob for knob in table.knobs if not _is_number(table, knob)]
    if kinds and (not words or rng.random() < 0.5):
        share = kinds[rng.integers(len(kinds))]
        factor = 1.7 ** rng.choice([-1.0, 1.0])
        return speed - np.log(1 + share * (factor - 1)), memory, {}
    column = table.column(words[rng.integers(len(words))])
    level = sorted(set(column), key=str)[rng.integers(len(set(column)))]
    hit = np.array([value == level for value in column])
    return speed - np.log(1.5) * rng.choice([-1.0, 1.0]) * hit, memory, {}


def _noisy(table: Table, rng: np.random.Generator) -> tuple[Floats, Floats, Mapping]:
    """Another program on the same host: 4 % scatter, one trial in twenty 15 % too slow."""
    speed, memory, _ = _levels(0.1)(table, rng)
    return speed, memory, {"speed_noise": 0.04, "memory_noise": 0.005, "outliers": 0.05}


WORLDS: Mapping[str, Maker] = {
    "exact": _exact,
    "levels-10": _levels(0.1),
    "levels-20": _levels(0.2),
    "levels-30": _levels(0.3),
    "curve": _curve,
    "fragmented": _fragmented,
    "activations-30": _activations,
    "misjudged": _misjudged,
    "noisy": _noisy,
}


# -- parts of errors ------------------------------------------------------------------------


def _mixture(
    table: Table,
    rng: np.random.Generator,
    *,
    shared: float,
    levels: float,
    curve: float,
    pairs: float,
    own: float,
) -> Floats:
    """A random error with root mean square 1 whose parts have these shares of the variance."""
    number = len(table.configurations)
    words = [knob for knob in table.knobs if not _is_number(table, knob)]
    trends = [knob for knob in table.knobs if _is_number(table, knob)]
    none = np.zeros(number)
    parts = [
        (levels, sum((_by_level(table, rng, [knob]) for knob in words), none)),
        (curve, sum((_trend(table, rng, knob) for knob in trends), none)),
        (pairs, sum((_pair(table, rng, p) for p in itertools.combinations(table.knobs, 2)), none)),
        (own, rng.normal(size=number)),
    ]
    total = np.full(number, np.sqrt(shared) * rng.choice([-1.0, 1.0]))
    for share, part in parts:
        centred = part - part.mean()
        if centred.any():
            total += np.sqrt(share) * centred / centred.std()
    return total / np.sqrt(np.mean(total**2))


def _by_level(table: Table, rng: np.random.Generator, knobs: object) -> Floats:
    """One random number for each combination of the knobs' values."""
    keys = list(zip(*(table.column(knob) for knob in knobs), strict=True))  # type: ignore[attr-defined]
    drawn = {key: rng.normal() for key in sorted(set(keys), key=str)}
    return np.array([drawn[key] for key in keys])


def _pair(table: Table, rng: np.random.Generator, pair: tuple[str, str]) -> Floats:
    """What two knobs do together: smooth in those that have an order, as kernels are."""
    words = [knob for knob in pair if not _is_number(table, knob)]
    trends = [_trend(table, rng, knob) for knob in pair if _is_number(table, knob)]
    level = _by_level(table, rng, words) if words else np.ones(len(table.configurations))
    return level * np.prod(trends, axis=0) if trends else level


def _trend(table: Table, rng: np.random.Generator, knob: str) -> Floats:
    """A random line and a bend over the logarithm of a knob."""
    values = np.log(_numbers(table, knob))
    place = 2 * (values - values.min()) / max(np.ptp(values), 1e-9) - 1
    return rng.normal() * place + 0.5 * rng.normal() * place**2


def _fragmentation(table: Table, rng: np.random.Generator, size: float) -> Floats:
    """Log of what unused blocks add: never negative, in proportion to what is not weights."""
    waste = np.abs(rng.normal(size=len(table.configurations))) * size
    return np.log1p(waste * _moving_share(table))


def _moving_share(table: Table) -> Floats:
    return 1 - np.minimum(table.arrays[LOADED] / table.arrays[DEVICE], 1.0)


def _is_number(table: Table, knob: str) -> bool:
    values = set(table.column(knob))
    return len(values) > 2 and all(
        isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values
    )


def _numbers(table: Table, knob: str) -> Floats:
    if knob not in table.knobs:
        return np.full(len(table.configurations), 4.0)
    return np.array(table.column(knob), dtype=float)
