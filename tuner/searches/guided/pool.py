"""The input of the guided sampler before the first trial: candidates and their predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.core.records import MemoryBudget, Prediction
from tuner.core.setup.schemas import MemoryOrder
from tuner.cost.calibrate import DEVICE, STEP, prior_of, uncorrected
from tuner.cost.speed.profile import uses_profile
from tuner.searches.candidates import Candidates
from tuner.searches.guided.regression import Prior
from tuner.trial.base import MeasureOptions
from tuner.trial.stop_rule import StepPlan

Floats = NDArray[np.float64]

START_S = 8.0
"""Time in seconds to start a trial's process and import libraries (half of 4 s)."""

LOAD_BYTES_PER_S = 1.5e9
"""Rate of loading weights to the device from a common NVMe drive. It matters only relative to the
time of steps, and only between configurations whose weights differ in size."""


BLIND_SHARE, BLIND_RISE = 0.5, 0.7
"""Guesses for spaces without predictions: the share of the limit that a configuration takes, and
the log of the memory ratio between the largest and the smallest value of a knob that adds memory.
"""

BLIND = Prior(shared=0.6, spread=0.6, noise=0.02)
"""Errors of these guesses of throughput and memory, as standard deviations of the logarithm."""

RATE = 2.0
"""Weight of predicted throughput in the features of its error; a value of a knob has 1 or less."""


@dataclass(frozen=True)
class Pool:
    """All candidates with their predictions: arrays with one entry per candidate.

    `trial_s` are the GPU seconds of a trial that ends well.
    """

    candidates: Candidates
    samples_per_s: Floats
    device_bytes: Floats
    loaded_bytes: Floats
    trial_s: Floats
    limit_bytes: float
    margin_bytes: float
    has_profile: bool = False
    """True if the GPU's rates were measured, which makes step times more certain."""
    is_blind: bool = False
    """True without predictions; the arrays then contain only guesses from the memory order."""

    @property
    def usable_bytes(self) -> float:
        """Memory in bytes that a recommended configuration may take: limit minus margin."""
        return self.limit_bytes - self.margin_bytes

    @property
    def moving_share(self) -> Floats:
        """The share of memory that comes and goes in a step: all but weights and states."""
        return 1.0 - np.minimum(self.loaded_bytes / self.device_bytes, 1.0)

    @property
    def log_rate(self) -> Floats:
        """The logarithm of predicted throughput, with a standard deviation of `RATE`.

        Where trials contradict the predictions as a whole, their differences shrink or turn round.
        """
        log = np.log(self.samples_per_s)
        return RATE * log / max(float(log.std()), 1e-9)

    @property
    def speed_prior(self) -> Prior:
        """The error of predicted throughput before any measurement."""
        return BLIND if self.is_blind else _prior(STEP, has_profile=self.has_profile)

    @property
    def memory_prior(self) -> Prior:
        """The error of predicted memory before any measurement."""
        return BLIND if self.is_blind else _prior(DEVICE, has_profile=self.has_profile)

    @classmethod
    def blind(cls, candidates: Candidates, order: MemoryOrder, budget: MemoryBudget) -> Pool:
        """The candidates without predictions, with guesses that trials soon outweigh.

        Memory rises with each knob that is declared to add memory; all else is equal.
        """
        number = len(candidates)
        even, none = np.ones(number), np.zeros(number)
        rise = BLIND_RISE * _places(candidates, order).sum(axis=1)
        return cls(
            candidates=candidates,
            samples_per_s=even,
            device_bytes=BLIND_SHARE * budget.limit_bytes * np.exp(rise - rise.mean()),
            loaded_bytes=none,
            trial_s=even,
            limit_bytes=float(budget.limit_bytes),
            margin_bytes=float(budget.margin_bytes),
            is_blind=True,
        )

    @classmethod
    def of(
        cls,
        candidates: Candidates,
        predictions: Sequence[Prediction],
        options: MeasureOptions | None = None,
    ) -> Pool:
        """The candidates with their predictions, in the same order.

        Corrections from earlier trials are undone, because the sampler learns from those trials.
        """
        options = options or MeasureOptions()
        raw = [uncorrected(prediction) for prediction in predictions]
        loaded = np.array([p.memory.loaded_bytes for p in raw], dtype=float)
        step_s = np.array([p.speed.step_s for p in raw])
        load_s = START_S + loaded / LOAD_BYTES_PER_S
        steps_s = np.array(
            [
                StepPlan(options, int(str(c.get("grad_accum", 1)))).needed_s(float(seconds))
                for c, seconds in zip(candidates.configurations, step_s, strict=True)
            ]
        )
        # A training in stages is tried in each distinct stage.
        runs = np.array([max(1, len(set(p.stages.values()))) for p in raw])
        return cls(
            candidates=candidates,
            samples_per_s=np.array([p.speed.samples_per_s for p in raw]),
            device_bytes=np.array([p.memory.device_bytes for p in raw], dtype=float),
            loaded_bytes=loaded,
            trial_s=runs * (load_s + steps_s),
            limit_bytes=float(raw[0].budget.limit_bytes),
            margin_bytes=float(raw[0].budget.margin_bytes),
            has_profile=uses_profile(raw[0].method),
        )


def _places(candidates: Candidates, order: MemoryOrder) -> Floats:
    """Positions of the candidates in 0..1 along the knobs that add memory, one column per knob."""
    parts = [order.split(configuration)[0] for configuration in candidates.configurations]
    names = [axis.name for axis in candidates.axes if all(axis.name in part for part in parts)]
    values = np.array([[part[name] for name in names] for part in parts]).reshape(len(parts), -1)
    ranks = [np.unique(column, return_inverse=True)[1] for column in values.T]
    found = [rank / max(rank.max(), 1) for rank in ranks]
    return np.stack(found, axis=1) if found else np.zeros((len(parts), 1))


def _prior(quantity: str, *, has_profile: bool) -> Prior:
    prior = prior_of(quantity, has_profile=has_profile)
    # The standard deviation of Student's t with 4 degrees of freedom is sqrt(2) of its scale.
    spread = math.sqrt(2.0) * prior.spread
    return Prior(shared=prior.bias_scale, spread=spread, noise=prior.least_spread)
