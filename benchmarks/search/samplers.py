"""Samplers that `tuner search` has no name for, as it takes them: by their class."""

from __future__ import annotations

from optuna.samplers import NSGAIISampler


class Nsga2(NSGAIISampler):  # type: ignore[misc]
    """Optuna's, with four generations in 150 trials: its default population of 50 has three."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed, population_size=37)


CLASSES = {"nsga2": f"{__name__}:Nsga2", "gp": "optuna.samplers:GPSampler"}
"""By the names that the tables have for them."""
