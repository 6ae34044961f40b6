"""`guided` as the benchmark runs it: the sampler in an Optuna study, told outcomes as values."""

from __future__ import annotations

import optuna
from optuna.trial import TrialState

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
from tuner.searches.guided.pool import Pool
from tuner.searches.guided.sampler import GuidedSampler


class Guided(Measured):
    """The sampler alone, without the adapter around it."""

    def __init__(self, table: Table, *, seed: int) -> None:
        super().__init__(table)
        self.sampler = GuidedSampler(pool_of(table), seed=seed)
        self._index = {
            tuple(sorted(p.items())): i for i, p in enumerate(self.sampler.pool.parameters)
        }
        self._study = optuna.create_study(directions=["maximize", "minimize"], sampler=self.sampler)
        self._trial: optuna.Trial | None = None

    def ask(self) -> Asked | None:
        """The sampler's next configuration."""
        trial = self._study.ask(dict(self.sampler.pool.distributions))
        if self.sampler.exhausted:
            return None
        self._trial = trial
        return Asked(self._index[tuple(sorted(trial.params.items()))])

    def tell(self, asked: Asked, trial: Trial) -> None:
        """Tell the study."""
        super().tell(asked, trial)
        assert self._trial is not None
        if trial.failed:
            self._study.tell(self._trial, state=TrialState.FAIL)
        elif trial.device_bytes is None or trial.samples_per_s is None:
            self._study.tell(self._trial, (0.0, 2 * self.table.limit_bytes))
        else:
            self._study.tell(self._trial, (trial.samples_per_s, trial.device_bytes))

    def recommend(self) -> int | None:
        """What the sampler recommends."""
        self.sampler.learn(self._study.get_trials(deepcopy=False))
        return self.sampler.recommend()


def pool_of(table: Table) -> Pool:
    """The table as the sampler's pool."""
    candidates = Candidates(table.configurations, table.knobs)
    load_s = START_S + table.arrays[LOADED] / LOAD_BYTES_PER_S
    step_s = table.arrays[STEP]
    return Pool(
        parameters=tuple(candidates.parameters(c) for c in table.configurations),
        distributions=candidates.distributions,
        coordinates=candidates.coordinates,
        samples_per_s=table.arrays[SAMPLES_PER_S],
        device_bytes=table.arrays[DEVICE],
        loaded_bytes=table.arrays[LOADED],
        trial_s=load_s + WARMUP_STEPS * step_s + (MIN_STEPS * step_s).clip(TIMED_S),
        oom_s=load_s,
        limit_bytes=table.limit_bytes,
        margin_bytes=table.margin_bytes,
        work_shares=table.kinds,
    )
