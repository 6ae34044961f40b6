"""BoTorch's constrained qLogNEHVI over the table, as a reference for `guided`.

It needs `pip install botorch` (0.18), which nothing else here does.

Log throughput and log memory have a Gaussian process each, whose mean is the prediction and a
constant, and whose kernel is that of BoTorch's `MixedSingleTaskGP` over the knobs. A configuration
must take at most the usable memory. One that ran out of memory counts as measured at a bound,
`BEYOND` above the limit, and says nothing about throughput. Once a trial failed otherwise, a third
process regresses on whether trials ran, and is the second constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.acquisition.multi_objective.objective import GenericMCMultiOutputObjective
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.kernels.categorical import CategoricalKernel
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.optim.fit import fit_gpytorch_mll_scipy
from botorch.sampling.normal import SobolQMCNormalSampler
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.means import Mean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior, NormalPrior
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor

from benchmarks.search.baselines import Measured, predicted_front
from benchmarks.search.guided import pool_of
from benchmarks.search.replay import Asked
from benchmarks.search.scenarios import Trial
from benchmarks.search.tables import Table
from tuner.searches.guided.regression import Prior

BEYOND = 0.1
"""Log memory, over the limit or the prediction, at which a trial counts that ran out of memory."""

FIRST = 2
"""Trials of the predicted front, from its two ends, before the processes are fitted."""

SAMPLES, SCREENED = 64, 400
"""Draws from the posterior, and candidates for which the acquisition is computed: those that would
gain most if both quantities turned out two standard deviations better."""

STEPS = 20
"""Steps of L-BFGS in each fit, which begins where the last one ended. Until it converges, a fit of
five trials takes eight seconds."""


class BoTorch(Measured):
    """Asks for the untried configuration with the largest acquisition; recommends by the mean."""

    def __init__(self, table: Table, *, seed: int) -> None:
        super().__init__(table)
        torch.set_num_threads(1)
        pool = pool_of(table)
        self._seed = seed
        self._scales = [_scale(pool.speed_prior), _scale(pool.memory_prior)]
        self._priors = [pool.speed_prior, pool.memory_prior]
        self._usable = np.log(pool.usable_bytes / pool.limit_bytes) / self._scales[1]
        logs = [np.log(pool.samples_per_s), np.log(pool.device_bytes / pool.limit_bytes)]
        self._unit = float(pool.samples_per_s.max())
        logs[0] = logs[0] - np.log(self._unit)
        told = np.stack([log / scale for log, scale in zip(logs, self._scales, strict=True)], 1)
        axes = pool.candidates.axes
        columns = pool.candidates.columns
        knobs = np.array([[axis.coordinate(v) for v in columns[axis.name]] for axis in axes]).T
        self._x = torch.tensor(np.hstack([knobs, told]))
        self._ordered = [i for i, axis in enumerate(axes) if axis.ordered]
        self._words = [i for i, axis in enumerate(axes) if not axis.ordered]
        front = predicted_front(table)
        self._first = list(dict.fromkeys([int(front[0]), int(front[-1])]))[:FIRST]
        self._places: list[list[int]] = [[], [], []]
        self._values: list[list[float]] = [[], [], []]
        self._models: ModelListGP | None = None
        self._learned: list[dict[str, Any]] = [{}, {}, {}]

    def ask(self) -> Asked | None:
        """The candidate with the largest acquisition."""
        tried = self._places[2]
        left = np.setdiff1d(np.arange(len(self._x)), tried)
        if not left.size:
            return None
        due = [place for place in self._first if place not in tried]
        if due or not self._places[0]:
            return Asked(due[0] if due else self._likely_to_run(left))
        model = self._fitted()
        acquisition = qLogNoisyExpectedHypervolumeImprovement(
            model=model,
            ref_point=torch.tensor([0.0, -1.0], dtype=torch.double),
            X_baseline=self._x[sorted(set(tried))],
            sampler=SobolQMCNormalSampler(torch.Size([SAMPLES]), seed=self._seed),
            objective=GenericMCMultiOutputObjective(self._objective),
            constraints=self._constraints(model),
            prune_baseline=True,
        )
        left = left[self._hopeful(model, left)]
        with torch.no_grad():
            worth = acquisition(self._x[left][:, None])
        return Asked(int(left[int(worth.argmax())]))

    def tell(self, asked: Asked, trial: Trial) -> None:
        """Keep the trial's logarithms, in the units of the processes."""
        super().tell(asked, trial)
        self._models = None
        self._note(2, asked.index, -1.0 if trial.failed else 1.0)
        if trial.failed:
            return
        if trial.device_bytes is None or trial.samples_per_s is None:
            told = max(float(self._x[asked.index, -1]), 0.0)
            self._note(1, asked.index, told + BEYOND / self._scales[1])
            return
        self._note(0, asked.index, np.log(trial.samples_per_s / self._unit) / self._scales[0])
        size = np.log(trial.device_bytes / self.table.limit_bytes) / self._scales[1]
        self._note(1, asked.index, size)

    def recommend(self) -> int | None:
        """The configuration of the fastest mean among those that fitted."""
        places = list(self.fitting)
        if len(places) < FIRST:
            return super().recommend()
        process = self._fitted().models[0]
        with torch.no_grad():
            means = process.posterior(self._x[places]).mean
        return places[int(means.argmax())]

    def _hopeful(self, model: ModelListGP, left: NDArray[np.intp]) -> NDArray[np.intp]:
        """Where in `left` the screened candidates are."""
        with torch.no_grad():
            found = [each.posterior(self._x[left][:, None]) for each in model.models[:2]]
            mean = [each.mean.flatten().numpy() for each in found]
            sd = [each.variance.flatten().sqrt().numpy() for each in found]
        fast = np.exp((mean[0] + 2 * sd[0]) * self._scales[0])
        small = np.exp(np.minimum(mean[1] - 2 * sd[1], 0.0) * self._scales[1])
        fits = ndtr((self._usable - mean[1]) / sd[1])
        known = [np.exp(np.array(v) * s) for v, s in zip(self._values, self._scales, strict=False)]
        sizes = dict(zip(self._places[1], known[1], strict=True))
        front = np.array([(sizes[p], v) for p, v in zip(self._places[0], known[0], strict=True)])
        covered = np.max(np.where(front[:, 0] <= small[:, None], front[:, 1], 0.0), axis=1)
        return np.argsort(-fits * (1 - small) * np.maximum(fast - covered, 0.0))[:SCREENED]

    def _likely_to_run(self, left: NDArray[np.intp]) -> int:
        """The likeliest to run of those predicted to fit; the smallest where none failed yet."""
        size = self._x[left, -1].numpy()
        if min(self._values[2]) > 0 or size.min() > self._usable:
            return int(left[np.argmin(size)])
        left = left[size <= self._usable]
        process = self._process(2)
        with torch.no_grad():
            return int(left[int(process.posterior(self._x[left][:, None]).mean.argmax())])

    def _note(self, of: int, place: int, value: float) -> None:
        self._places[of].append(place)
        self._values[of].append(float(value))

    def _fitted(self) -> ModelListGP:
        if self._models is None:
            torch.manual_seed(self._seed)
            number = 3 if min(self._values[2]) < 0 else 2
            self._models = ModelListGP(*(self._process(of) for of in range(number)))
        return self._models

    def _process(self, of: int) -> SingleTaskGP:
        x = self._x[self._places[of]]
        y = torch.tensor(self._values[of], dtype=torch.double)[:, None]
        told = None if of == 2 else self._x.shape[1] - 2 + of
        shared = 1.0 if of == 2 else self._priors[of].shared / self._scales[of]
        model = SingleTaskGP(
            x, y, outcome_transform=None, mean_module=_Told(told, shared),
            covar_module=mixed_kernel(self._ordered, self._words),
        )  # fmt: skip
        if self._learned[of]:
            model.load_state_dict(self._learned[of])
        fit_gpytorch_mll_scipy(
            ExactMarginalLogLikelihood(model.likelihood, model), options={"maxiter": STEPS}
        )
        model.eval()
        self._learned[of] = model.state_dict()
        return model

    def _objective(self, samples: Tensor, X: Tensor | None = None) -> Tensor:  # noqa: N803
        speed = torch.exp(samples[..., 0] * self._scales[0])
        return torch.stack([speed, -torch.exp(samples[..., 1] * self._scales[1])], dim=-1)

    def _constraints(self, model: ModelListGP) -> list[Any]:
        """Functions of samples that are negative where a configuration is feasible."""
        found = [lambda samples: samples[..., 1] - self._usable]
        if len(model.models) > 2:
            found.append(lambda samples: -samples[..., 2])
        return found


class _Told(Mean):  # type: ignore[misc]
    """The prediction, which is a column of the inputs, and a constant of unknown size."""

    def __init__(self, column: int | None, shared: float) -> None:
        super().__init__()
        self.column = column
        self.register_parameter("constant", torch.nn.Parameter(torch.zeros((), dtype=torch.double)))
        self.register_prior("constant_prior", NormalPrior(0.0, shared), "constant")

    def forward(self, x: Tensor) -> Tensor:
        """The mean at each input."""
        told = torch.zeros_like(x[..., 0]) if self.column is None else x[..., self.column]
        return told + self.constant


def mixed_kernel(ordered: Sequence[int], words: Sequence[int]) -> Kernel:
    """The kernel of `MixedSingleTaskGP` on these columns, with priors on its scales.

    That model would take the predictions for knobs too. Outputs are in units of the predictions'
    known error, so scales around 1 are likely.
    """

    def smooth() -> Kernel:
        return get_covar_module_with_dim_scaled_prior(len(ordered), active_dims=list(ordered))

    def by_word() -> Kernel:
        return CategoricalKernel(
            ard_num_dims=len(words),
            active_dims=list(words),
            lengthscale_constraint=GreaterThan(1e-06),
        )

    def scaled(kernel: Kernel) -> Kernel:
        return ScaleKernel(
            kernel,
            outputscale_prior=LogNormalPrior(-0.7, 1.0),
            outputscale_constraint=GreaterThan(1e-4),
        )

    if not words or not ordered:
        return scaled(smooth() if ordered else by_word())
    return scaled(smooth() + scaled(by_word())) + scaled(smooth() * by_word())


def _scale(prior: Prior) -> float:
    return float(np.hypot(prior.shared, prior.spread))
