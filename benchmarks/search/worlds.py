"""The door for worlds of your own, and the worlds that were found by using it.

    from benchmarks.search import load_table, play
    from tuner.space import load_space

    def world(configuration):
        return 2.0 / configuration["micro_batch"], 20e9, "ok"  # samples/s, bytes, ending

    found = play(world, load_table(load_space("qlora27b"), "a6000"), seed=0)
    print(found.regret[-1], found.trials_to(0.99), sum(found.oom))

`python -m benchmarks.search --world MODULE:FUNCTION` plays such a function from the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.search.guided import Guided
from benchmarks.search.replay import Replay, Searcher, replay
from benchmarks.search.scenarios import WORLDS, Maker, Scenario, _is_number, _moving_share
from benchmarks.search.tables import DEVICE, SAMPLES_PER_S, Floats, Table
from tuner.core.records import Configuration

World = Callable[[Configuration], tuple[float, float, str]]
"""The truth about a configuration: its throughput in samples/s, its memory in bytes, and how its
trial ends: "ok", "oom" or "failed". More memory than the GPU has is "oom" anyway."""

ENDINGS = ("ok", "oom", "failed")


def play(
    world: World,
    table: Table,
    seed: int = 0,
    *,
    trials: int = 40,
    noise: float = 0.01,
    make: Callable[[Table], Searcher] = Guided,
) -> Replay:
    """Search `table` in `world`, and compare with the truth after each trial.

    `world` is called once for each configuration of the table. Trials scatter around its
    throughput by `noise`, a standard deviation of the logarithm, drawn with `seed`. `make` makes
    the searcher from the table. Raises ValueError for an answer that is no truth, or if no
    configuration fits.
    """
    return replay(scenario_of(world, table, noise=noise), make(table), trials=trials, seed=seed)


def scenario_of(world: World, table: Table, *, noise: float = 0.01, name: str = "own") -> Scenario:
    """The function as a scenario; see `play`."""
    answers = [world(configuration) for configuration in table.configurations]
    for configuration, (speed, size, ending) in zip(table.configurations, answers, strict=True):
        if ending not in ENDINGS or (ending == "ok" and not (speed > 0 and size > 0)):
            raise ValueError(
                f"the world answers {(speed, size, ending)} for {dict(configuration)}; expected "
                f"samples/s and bytes above 0, and one of {', '.join(ENDINGS)}"
            )
    ended = np.array([ending for _, _, ending in answers])
    sizes = np.array([size for _, size, _ in answers], dtype=float)
    scenario = Scenario(
        name=name,
        table=table,
        samples_per_s=np.array([max(speed, 1e-12) for speed, _, _ in answers], dtype=float),
        device_bytes=np.where(ended == "oom", np.maximum(sizes, 2 * table.limit_bytes), sizes),
        speed_noise=noise,
        crashes=ended == "failed",
    )
    if not scenario.feasible.any():
        raise ValueError(f"in this world no configuration of {table.name} fits")
    return scenario


Errors = tuple[Floats, Floats, Mapping[str, Any]]


def _own_error(sd: float) -> Maker:
    """Each configuration has an error of its own, which no other tells; trials repeat within 1 %.

    17 % is the scatter of our predictions around published runs, and of runs around one another.
    """

    def make(table: Table, rng: np.random.Generator) -> Errors:
        none = np.zeros(len(table.configurations))
        return sd * rng.normal(size=len(none)), none, {}

    return make


def _pair(table: Table, rng: np.random.Generator) -> Errors:
    """Two values of the fastest together are 40 % slower and take 30 % more memory."""
    fits = table.arrays[DEVICE] <= table.limit_bytes - table.margin_bytes
    best = int(np.argmax(np.where(fits, table.arrays[SAMPLES_PER_S], 0.0)))
    words = [knob for knob in table.knobs if not _is_number(table, knob)]
    chosen = rng.choice(words, size=2, replace=False)
    columns = [np.array(table.column(knob), dtype=object) for knob in chosen]
    hit = np.all([column == column[best] for column in columns], axis=0)
    return np.log(0.6) * hit, np.log(1.3) * hit, {}


def _hidden_half(table: Table, rng: np.random.Generator) -> Errors:
    """Without checkpointing, 45 % of the memory beside weights is never taken."""
    off = np.array([not c.get("gradient_checkpointing") for c in table.configurations])
    none = np.zeros(len(off))
    return none, np.log1p(-0.45 * off * _moving_share(table)), {}


def _noise(sd: float) -> Maker:
    """Predictions are off by a tenth at levels, and trials scatter by `sd`."""

    def make(table: Table, rng: np.random.Generator) -> Errors:
        speed, memory, _ = WORLDS["levels-10"](table, rng)
        return speed, memory, {"speed_noise": sd}

    return make


def _two_hosts(table: Table, rng: np.random.Generator) -> Errors:
    """Every other trial runs on a host that is a quarter slower."""
    speed, memory, _ = WORLDS["levels-10"](table, rng)
    return speed, memory, {"outliers": 0.5, "outlier": np.log(0.75)}


BELIEVED: Mapping[str, Maker] = {
    "own-7": _own_error(0.07),
    "own-17": _own_error(0.17),
    "pair": _pair,
    "hidden-half": _hidden_half,
    "noise-15": _noise(0.15),
    "two-hosts": _two_hosts,
}
"""Worlds of the issue about measurements: what one run cannot tell, repeats must."""
