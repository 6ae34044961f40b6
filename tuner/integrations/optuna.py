"""The guided search as a sampler of Optuna's, which Ray Tune takes in OptunaSearch."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from tuner.app.search.supported import supported_part
from tuner.core.errors import InputError
from tuner.core.host import usable_cpus
from tuner.core.records import Configuration
from tuner.predict.predictor import SpacePredictor
from tuner.searches.candidates import Candidates, parameter
from tuner.searches.guided.pool import Pool
from tuner.searches.guided.sampler import Guided
from tuner.space import SearchSpace, load_space
from tuner.space.gpus import get_gpu

DEVICE_BYTES = "device_bytes"
"""The attribute of a trial that says its memory where the study has throughput alone."""


class GuidedSampler(BaseSampler):  # type: ignore[misc]
    """Proposes configurations of a search space that will very probably fit a GPU.

    A study's first value is throughput, to maximize; its second, if any, device memory in bytes, to
    minimize: `create_study(directions=["maximize", "minimize"], sampler=GuidedSampler(...))`. With
    one value a trial says its memory by `set_user_attr("device_bytes", ...)`, and else has what was
    predicted. More bytes than the GPU has, such as `math.inf`, mean that it ran out of memory. A
    trial that failed tells of a region that fails.

    The study stops where no configuration is left that may fit. Raises `InputError` for an unknown
    space or GPU type, and for a space without predictions.
    """

    def __init__(
        self, space: str | Path | SearchSpace, gpu: str, *, seed: int | None = None
    ) -> None:
        """`gpu` is the name of a GPU type; `seed` is for parameters outside of the space."""
        self.space = space if isinstance(space, SearchSpace) else load_space(str(space))
        if not self.space.predictable:
            raise InputError(f"{self.space.name} has no predictions, which the sampler starts from")
        device = get_gpu(gpu)
        part = supported_part(self.space, device, (), runs=True)
        predictor = SpacePredictor(self.space, device, workers=usable_cpus())
        found = predictor.predict(part.supported)
        self._candidates = Candidates(part.supported, tuple(self.space.knobs))
        self._guide = Guided(Pool.of(self._candidates, [each.prediction for each in found]))
        self._place_of = {
            tuple(self._candidates.parameters(each).values()): place
            for place, each in enumerate(part.supported)
        }
        self._seen: set[int] = set()
        self._without: set[int] = set()
        self._lock = threading.Lock()
        self._others = RandomSampler(seed=seed)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The parameters that vary: the `space` of Ray Tune's OptunaSearch."""
        return self._candidates.distributions

    def suggest(self, trial: optuna.Trial) -> Configuration:
        """The whole configuration of a trial, with what the space fixes and computes.

        Raises `TrialPruned` for a trial behind the last one that may fit.
        """
        for name, found in self.distributions.items():
            if isinstance(found, optuna.distributions.CategoricalDistribution):
                trial.suggest_categorical(name, found.choices)
            elif isinstance(found, optuna.distributions.IntDistribution):
                trial.suggest_int(name, found.low, found.high, log=found.log)
            else:
                trial.suggest_float(name, found.low, found.high, log=found.log)
        if trial.number in self._without:
            raise optuna.TrialPruned("no configuration is left that may fit")
        return self.configuration(trial.params)

    def configuration(self, params: Mapping[str, Any]) -> Configuration:
        """The configuration with these parameters. Raises `InputError` if the space has none."""
        place = self._place(params)
        if place is None:
            raise InputError(f"no configuration of {self.space.name} has {dict(params)}")
        return self._candidates.configurations[place]

    def constraints_func(self, trial: FrozenTrial) -> tuple[float]:
        """Bytes beyond what a recommended configuration may take, for samplers of Optuna's."""
        return (self._values(trial)[1] - self._guide.pool.usable_bytes,)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """As `distributions`."""
        return self.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The parameters of the best candidate, after what other trials told."""
        if study.directions[0] != optuna.study.StudyDirection.MAXIMIZE:
            raise InputError("the first value of the study is throughput: maximize it")
        with self._lock:
            for other in study.get_trials(deepcopy=False):
                if other.number != trial.number:
                    self._learn(other)
            place = self._guide.choose()
        if place is None:
            self._without.add(trial.number)
            with contextlib.suppress(RuntimeError):  # outside of `optimize` nothing is to stop
                study.stop()
            return {}
        return self._candidates.parameters(self._candidates.configurations[place])

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """By chance: a parameter that the space does not have."""
        return self._others.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        """For the threads of `optimize`, as Optuna asks."""
        self._others.reseed_rng()

    def _place(self, params: Mapping[str, Any]) -> int | None:
        names = [axis.name for axis in self._candidates.axes]
        return self._place_of.get(tuple(parameter(params.get(name, "")) for name in names))

    def _learn(self, trial: FrozenTrial) -> None:
        if trial.number in self._seen or (place := self._place(trial.params)) is None:
            return
        if trial.state == TrialState.COMPLETE:
            self._guide.end(place, self._values(trial))
        elif trial.state == TrialState.FAIL:
            self._guide.end(place, failure="failed")
        else:
            if not trial.state.is_finished():
                self._guide.begin(place)
            return
        self._seen.add(trial.number)

    def _values(self, trial: FrozenTrial) -> tuple[float, float]:
        """Throughput and bytes of a trial that ended."""
        speed, *rest = trial.values or (0.0,)
        pool, place = self._guide.pool, self._place(trial.params)
        predicted = math.inf if place is None else float(pool.device_bytes[place])
        return speed, rest[0] if rest else float(trial.user_attrs.get(DEVICE_BYTES, predicted))
