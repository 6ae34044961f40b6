"""The error of predictions as a function of the knobs: a regression on few trials.

The model, for one quantity (throughput or memory) of one space on one GPU:

    log(measured / predicted) = sum over features of weight * feature + noise

The features are sources of prediction error: one factor shared by all configurations, effects of
knob levels, trends over ordered knobs, pairs of these, and the share of moving memory. Each is
scaled by its expected size before any measurement, so that one prior serves all weights. With few
trials the prediction dominates, with many the trials do. The general error of the prediction is
estimated from the evidence (Tipping 2001 and MacKay 1992, as implemented by scikit-learn's
`BayesianRidge`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Column = Sequence[object]

LEVEL, TREND, BEND, STEP, PAIR, SHARE = 0.6, 0.6, 0.3, 0.15, 0.3, 2.0
"""Relative scales of the kinds of feature; their common scale is `Prior.spread`.

The moving memory may be off by a factor, not by a tenth, hence 2 for its share.
"""

PRIOR_TRIALS = 2.0
"""The priors of the scale and of the noise weigh as much as this many trials."""

DEGREES = 4.0
"""Degrees of freedom of Student's t, as in `tuner.cost.interval`: outliers get less weight."""

MOST_CENSORED = 64
"""Maximum number of bounds to learn from at once: those that contradict the belief most."""

SHARED_BY_BOUNDS = 0.3
"""Share of an out-of-memory error that is attributed to the factor of all configurations."""


@dataclass(frozen=True, slots=True)
class Prior:
    """Standard deviations of log(measured / predicted) before anything is measured.

    `shared` is common to all configurations, `spread` differs between them, and `noise` is the
    scatter of a configuration's trials with everything that no feature explains.
    """

    shared: float
    spread: float
    noise: float


def features(
    columns: Mapping[str, Column],
    ordered: Mapping[str, Floats],
    shares: Mapping[str, Floats],
    prior: Prior,
) -> Floats:
    """Scaled features of every candidate, shape (candidates, features); the first is shared.

    `columns` are the knobs' values, `ordered` the coordinates in 0..1 of ordered knobs, and
    `shares` numbers in 0..1 from the predictions.
    """
    number = len(next(iter(columns.values())))
    marks: dict[str, Floats] = {}
    found: list[Floats] = []
    for name, column in columns.items():
        levels = list(dict.fromkeys(column))
        one_hot = np.array([[value == level for level in levels] for value in column], dtype=float)
        if name in ordered:
            place = 2.0 * ordered[name][:, None] - 1.0
            found += [TREND * place, BEND * (place**2 - 0.5), STEP * one_hot]
            marks[name] = place
        else:
            found.append(LEVEL * one_hot)
            marks[name] = one_hot
    for one, other in itertools.combinations(marks.values(), 2):
        product = one[:, :, None] * other[:, None, :]
        found.append(PAIR * product.reshape(number, -1))
    for share in shares.values():
        if np.ptp(share) > 0:
            found.append(SHARE * (share - share.mean())[:, None])
    own = np.hstack(found)
    own = own[:, np.ptp(own, axis=0) > 0]
    # More knobs have more products, so the features are scaled to a known sum of squares.
    own *= prior.spread / np.sqrt(np.mean(np.sum(own**2, axis=1)))
    return np.hstack([np.full((number, 1), prior.shared), own])


@dataclass(frozen=True, slots=True)
class Belief:
    """The expected log(measured / predicted): mean and standard deviation of each candidate."""

    mean: Floats
    sd: Floats
    noise: float


class ResidualModel:
    """Learns log(measured / predicted) from trials, for all candidates at once."""

    def __init__(self, design: Floats, prior: Prior, scale: Floats | None = None) -> None:
        """`scale` is the ratio of each candidate's noise to the usual noise; 1 by default."""
        self._design, self._prior = design, prior
        self._squares = np.sum(design**2, axis=1)
        self._scale = np.ones(len(design)) if scale is None else scale

    def prior_belief(self) -> Belief:
        """The belief before any measurement."""
        noise = self._prior.noise * self._scale
        variance = self._squares + noise**2
        return Belief(np.zeros(len(self._design)), np.sqrt(variance), self._prior.noise)

    def believe(
        self,
        seen: NDArray[np.intp],
        values: Floats,
        above: NDArray[np.intp],
        bounds: Floats,
        *,
        trust: Floats | None = None,
        trust_above: Floats | None = None,
    ) -> Belief:
        """The belief after trials.

        `seen` and `values` are candidates and their log ratios; `above` are candidates that ran out
        of memory, so that their log ratio exceeds `bounds`. `trust` and `trust_above` are the
        weights of each, 1 by default.
        """
        belief = self.prior_belief()
        trust = np.ones(len(seen)) if trust is None else trust
        weights = trust
        if len(seen):
            belief = self._fit(seen, values, weights)
            residuals = (values - belief.mean[seen]) / (belief.noise * self._scale[seen])
            pulls = (DEGREES + 1) / (DEGREES + trust * residuals**2)
            weights = trust * pulls
            if pulls.min() < 0.5:  # an outlier
                belief = self._fit(seen, values, weights)
        if not len(above):
            return belief
        trust_above = np.ones(len(above)) if trust_above is None else trust_above
        return self._censored(belief, (seen, values, weights), (above, bounds, trust_above))

    def _censored(
        self,
        belief: Belief,
        data: tuple[NDArray[np.intp], Floats, Floats],
        bounded: tuple[NDArray[np.intp], Floats, Floats],
    ) -> Belief:
        """Add the bounds as values with the same mean and variance as the truncated belief.

        This is one pass of expectation propagation (Minka 2001) with all bounds at once.
        """
        above, bounds, trust = bounded
        mean, variance = belief.mean[above], belief.sd[above] ** 2
        z = (bounds - mean) / np.sqrt(variance)
        surprising = np.argsort(-z)[:MOST_CENSORED]
        surprising = surprising[z[surprising] > -2.0]  # the others are as expected
        if not surprising.size:
            return belief
        above, z, mean = above[surprising], z[surprising], mean[surprising]
        variance, trust = variance[surprising], trust[surprising]
        hazard = _hazard(z)
        shrink = hazard * (hazard - z)  # variance of the truncated normal is 1 - shrink
        sites = variance * np.maximum(1.0 / np.clip(shrink, 1e-6, 1 - 1e-6) - 1.0, 1e-6)
        targets = mean + np.sqrt(variance) * hazard / np.clip(shrink, 1e-6, None)
        seen, values, weights = data
        site_weights = trust * np.minimum((belief.noise * self._scale[above]) ** 2 / sites, 1.0)
        return self._fit(
            np.concatenate([seen, above]),
            np.concatenate([values, targets]),
            np.concatenate([weights, site_weights]),
            above=len(above),
        )

    def _fit(
        self, places: NDArray[np.intp], values: Floats, weights: Floats, above: int = 0
    ) -> Belief:
        """The belief from values, the last `above` of them from trials that ran out of memory.

        These count little for the factor of all configurations: their excess over the limit is
        unknown, and a single level that needs more memory would raise all predictions.
        """
        from sklearn.linear_model import BayesianRidge  # a second to import

        weights = weights / self._scale[places] ** 2
        # Weights below 1 may sum to less than the number of learned parameters, which would make
        # the remaining noise negative.
        unit = min(1.0, float(weights.mean()))
        weights = weights / unit
        noise_variance = self._prior.noise**2 / unit
        model = BayesianRidge(
            max_iter=50,
            alpha_1=PRIOR_TRIALS,
            alpha_2=PRIOR_TRIALS * noise_variance,
            lambda_1=PRIOR_TRIALS,
            lambda_2=PRIOR_TRIALS,
            alpha_init=1.0 / noise_variance,
            lambda_init=1.0,
            fit_intercept=False,
        )
        rows = self._design[places]
        rows[len(rows) - above :, 0] *= SHARED_BY_BOUNDS
        # Matrices this small are slower with several threads, even more so beside other programs.
        with _thread_pools().limit(limits=1, user_api="blas"):
            model.fit(rows, values, sample_weight=weights)
            variance = self._variance(model, np.sqrt(weights)[:, None] * rows)
            mean = self._design @ model.coef_
        noise = float((unit / model.alpha_) ** 0.5)
        return Belief(mean, np.sqrt(variance + (noise * self._scale) ** 2), noise)

    def _variance(self, model: Any, weighted: Floats) -> Floats:
        """The variance of each candidate's mean, equal to that of `model.predict`, but faster.

        With fewer trials than features, the posterior differs from the prior in only as many
        directions as there are trials, and only these are computed.
        """
        from scipy.linalg import cholesky, solve_triangular

        trials, number = weighted.shape
        if trials > number / 2:
            return np.asarray(np.einsum("ij,ij->i", self._design @ model.sigma_, self._design))
        inner = weighted @ weighted.T + model.lambda_ / model.alpha_ * np.eye(trials)
        known = solve_triangular(cholesky(inner, lower=True), weighted, lower=True) @ self._design.T
        return np.asarray((self._squares - np.sum(known**2, axis=0)) / model.lambda_)


@functools.cache
def _thread_pools() -> Any:
    """The thread pools of the loaded libraries; finding them takes 10 ms."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _hazard(z: Floats) -> Floats:
    """Normal density divided by its upper tail (inverse Mills ratio); stable for large z."""
    from scipy.stats import norm

    return np.asarray(np.exp(norm.logpdf(z) - norm.logsf(z)), dtype=float)
