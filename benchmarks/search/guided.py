"""`guided` as the benchmark runs it: asked and told without the search around it."""

from __future__ import annotations

import numpy as np

from benchmarks.search.baselines import Measured
from benchmarks.search.replay import Asked
from benchmarks.search.scenarios import (
    LOAD_BYTES_PER_S,
    MIN_STEPS,
    START_S,
    TIMED_S,
    WARMUP_STEPS,
    Trial,
)
from benchmarks.search.tables import DEVICE, LOADED, SAMPLES_PER_S, STEP, Table
from tuner.searches.candidates import Candidates
from tuner.searches.guided import sampler
from tuner.searches.guided.pool import Pool


class Guided(Measured):
    """The sampler alone, without the adapter around it."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.sampler = sampler.Guided(pool_of(table), repeats=True)

    def ask(self) -> Asked | None:
        """The sampler's next configuration."""
        place = self.sampler.choose()
        return None if place is None else Asked(place)

    def tell(self, asked: Asked, trial: Trial) -> None:
        """Tell the sampler."""
        super().tell(asked, trial)
        if trial.failed:
            self.sampler.end(asked.index, failure="failed")
        elif trial.device_bytes is None or trial.samples_per_s is None:
            self.sampler.end(asked.index, (0.0, 2 * self.table.limit_bytes))
        else:
            self.sampler.end(asked.index, (trial.samples_per_s, trial.device_bytes))

    def recommend(self) -> int | None:
        """The fastest that fitted, by the sampler's estimates."""
        seen, speed, size = self.sampler.experience.estimates()
        speed = np.where(size <= self.sampler.pool.usable_bytes, speed, 0.0)
        return int(seen[np.argmax(speed)]) if speed.any() else None


def pool_of(table: Table) -> Pool:
    """The table as the sampler's pool."""
    candidates = Candidates(table.configurations, table.knobs)
    load_s = START_S + table.arrays[LOADED] / LOAD_BYTES_PER_S
    step_s = table.arrays[STEP]
    return Pool(
        candidates=candidates,
        samples_per_s=table.arrays[SAMPLES_PER_S],
        device_bytes=table.arrays[DEVICE],
        loaded_bytes=table.arrays[LOADED],
        trial_s=load_s + WARMUP_STEPS * step_s + (MIN_STEPS * step_s).clip(TIMED_S),
        limit_bytes=table.limit_bytes,
        margin_bytes=table.margin_bytes,
    )
