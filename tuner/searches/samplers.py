"""Optuna's samplers as a search uses them: over one fixed box of knobs, from a seed.

A decision begins with a sampler of its own, so that chance depends on the seed and the number of
trials and on nothing that happened in this process. Optuna's samplers then look through all
trials for the parameters that these have in common, with a comparison of every distribution:
20 ms at 1,000 trials. Here every trial has the same parameters, which are told instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from tuner.core.errors import InputError
from tuner.predict.training import load_object

Box = Mapping[str, BaseDistribution]


def sampler_of(name: str, *, seed: int, box: Box) -> BaseSampler:
    """The sampler "tpe"; a random one for any other plain name.

    `box` has the parameters of every trial. "package.module:Class" is a class of samplers, made
    with `seed=`. Raises `InputError` where there is none.
    """
    if ":" in name:
        found = load_object(name, "searcher")
        if not (isinstance(found, type) and issubclass(found, BaseSampler)):
            raise InputError(f"searcher {name!r} is no sampler of Optuna's (a BaseSampler)")
        return found(seed=seed)
    if name == "tpe":
        return _Tpe(box, seed)
    return RandomSampler(seed=seed)


class _Tpe(TPESampler):  # type: ignore[misc]
    """All knobs from one split of the trials; knob by knob, each would split them again."""

    def __init__(self, box: Box, seed: int) -> None:
        super().__init__(seed=seed, constant_liar=True, multivariate=True)
        self._box = dict(box)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._box
