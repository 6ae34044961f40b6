"""The error of predictions as a function of the knobs: a regression on few trials.

The model, for one quantity (throughput or memory) of one space on one GPU:

    log(measured / predicted) = sum over features of weight * feature + noise

The features are sources of prediction error: one factor shared by all configurations, effects of
values, trends over ordered knobs, and the share of moving memory. They are scaled so that all
weights are standard normal before any measurement. With few trials the prediction dominates, with
many the trials do. The scale of the weights and the noise are those that make the trials most
probable.

A single large effect would be spread over all features. So causes are compared, such as one value
or a pair of values that is slower than predicted: `Fit.odds` says how probable each is, and
`Fit.under` what it would mean for every candidate (a spike beside the ridge, after Mitchell and
Beauchamp 1988).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.intp]
Column = Sequence[object]

PRIOR_TRIALS = 4.0
"""The prior of the noise weighs as much as this many trials."""

EFFECT = 4.0
"""Standard deviation of the effect of a cause, as a multiple of `Prior.spread`."""

SCALES, NOISES = np.geomspace(0.5, 8.0, 9), np.geomspace(0.25, 16.0, 19)
"""The grid of the weights' scale, and of the noise as a multiple of `Prior.noise`."""


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
    `shares` numbers from the predictions.
    """
    number = len(next(iter(columns.values())))
    found: list[Floats] = []
    for name, column in columns.items():
        if name in ordered:
            place = 2.0 * ordered[name][:, None] - 1.0
            found += [place, place**2 - 0.5]
        else:
            levels = list(dict.fromkeys(column))
            found.append(np.array([[value == level for level in levels] for value in column]))
    found += [(share - share.mean())[:, None] for share in shares.values()]
    own = np.hstack(found).astype(float)
    own = own[:, np.ptp(own, axis=0) > 0]
    # More knobs have more features, which are scaled to a known sum of squares.
    own *= prior.spread / np.sqrt(np.mean(np.sum(own**2, axis=1)))
    return np.hstack([np.full((number, 1), prior.shared), own])


@dataclass(frozen=True, slots=True)
class Belief:
    """The expected log(measured / predicted): mean and standard deviation of each candidate."""

    mean: Floats
    sd: Floats
    noise: float


@dataclass(frozen=True, slots=True)
class Trials:
    """Trials of candidates, with log(measured / predicted), and their weight (1 is usual)."""

    places: Places
    values: Floats
    weights: Floats


class ResidualModel:
    """Learns log(measured / predicted) from trials, for all candidates at once."""

    def __init__(self, design: Floats, prior: Prior, scale: Floats | None = None) -> None:
        """`scale` is the ratio of each candidate's noise to the usual noise; 1 by default."""
        self.design, self.prior = design, prior
        self.squares = np.sum(design**2, axis=1)
        self.scale = np.ones(len(design)) if scale is None else scale

    def fit(self, trials: Trials, bounds: Trials | None = None) -> Fit:
        """The regression after trials; `bounds` are values that other trials exceeded."""
        found = Fit(self, trials)
        if bounds is None or not len(bounds.places):
            return found
        belief = found.belief
        mean, sd = belief.mean[bounds.places], belief.sd[bounds.places]
        z = (bounds.values - mean) / sd
        surprising = np.flatnonzero(z > -2.0)  # the others are as expected
        if not surprising.size:
            return found
        # The bounds become values with the same mean and variance as the truncated belief: one
        # pass of expectation propagation (Minka 2001) with all bounds at once.
        above, z, mean, sd = (
            bounds.places[surprising],
            z[surprising],
            mean[surprising],
            sd[surprising],
        )
        # Normal density divided by its upper tail (inverse Mills ratio); stable for large z.
        from scipy.stats import norm

        hazard = np.asarray(np.exp(norm.logpdf(z) - norm.logsf(z)), dtype=float)
        shrink = np.clip(hazard * (hazard - z), 1e-6, 1 - 1e-6)  # of the truncated variance
        sites = sd**2 * (1.0 / shrink - 1.0)
        weights = np.minimum((belief.noise * self.scale[above]) ** 2 / np.maximum(sites, 1e-12), 1)
        return Fit(
            self,
            Trials(
                np.concatenate([trials.places, above]),
                np.concatenate([trials.values, mean + sd * hazard / shrink]),
                np.concatenate([trials.weights, bounds.weights[surprising] * weights]),
            ),
        )


class Fit:
    """The beliefs of a model after trials, and after each possible cause of them.

    The scale of the weights and the noise are those that make the trials and their priors most
    probable, of a grid; they differ from cause to cause.
    """

    def __init__(self, model: ResidualModel, trials: Trials) -> None:
        """Find the belief without a cause."""
        self.model, self.trials = model, trials
        self._root = np.sqrt(trials.weights) / model.scale[trials.places]
        rows = self._root[:, None] * model.design[trials.places]
        left, singular, right = np.linalg.svd(rows, full_matrices=False)
        self._left, self._singular = left, singular
        self._across = model.design @ right.T
        self._values = self._root * trials.values
        self._inside = left.T @ self._values
        # All combinations of a variance of the weights, 1 before any trial, and of the noise.
        scales, noises = np.meshgrid(SCALES**2, (model.prior.noise * NOISES) ** 2)
        self._scales, self._noises = scales.ravel(), noises.ravel()
        signal = self._scales[:, None] * singular**2
        self._shrunk = signal / (signal + self._noises[:, None])
        rest = max(float(self._values @ self._values - self._inside @ self._inside), 0.0)
        usual = model.prior.noise**2
        logs = np.sum(np.log(signal + self._noises[:, None]), axis=1)
        logs += (1.0 - self._shrunk) @ self._inside**2 / self._noises
        logs += (len(left) - len(singular)) * np.log(self._noises) + rest / self._noises
        logs += PRIOR_TRIALS * (np.log(self._noises) + usual / self._noises)
        logs += PRIOR_TRIALS * (np.log(self._scales) + 1.0 / self._scales)
        self._logs = -0.5 * logs
        self._effect = (EFFECT * model.prior.spread) ** 2
        self.belief = self._belief(int(np.argmax(self._logs)))

    def odds(self, marks: Floats) -> Floats:
        """Logarithms of the odds of causes against none, from what the trials say.

        `marks` are 1 for the trials that each cause affects, shape (trials, causes). The effect of
        a cause is normal, with a standard deviation of `EFFECT` times the prior's spread.
        """
        return self._odds(self._logs_with(marks))

    def odds_alone(self) -> Floats:
        """As `odds`, of one cause for each trial that affects no other."""
        own = (1.0 - self._shrunk @ (self._left**2).T) * self._root**2
        pull = (self._values - (self._shrunk * self._inside) @ self._left.T) * self._root
        return self._odds(self._logs_of(own, pull))

    def _odds(self, logs: Floats) -> Floats:
        return np.asarray(_log_sum(logs) - _log_sum(self._logs[:, None]))

    def under(self, marks: Floats, mask: Floats) -> Belief:
        """The belief if one cause is real, which affects the trials in `marks`, shape (trials,).

        `mask` is 1 for every candidate that it affects.
        """
        point = int(np.argmax(self._logs_with(marks[:, None])[:, 0]))
        return self._belief(point, (marks, mask))

    def _logs_with(self, marks: Floats) -> Floats:
        """Logarithms of the probability of each point of the grid, shape (points, causes)."""
        weighted = self._root[:, None] * marks
        inside = self._left.T @ weighted
        own = np.sum(weighted**2, axis=0) - self._shrunk @ inside**2
        pull = self._values @ weighted - (self._shrunk * self._inside) @ inside
        return self._logs_of(own, pull)

    def _logs_of(self, own: Floats, pull: Floats) -> Floats:
        """As `_logs_with`, from products of causes with themselves and with the trials' values.

        Both are in units of the noise's variance, which is not yet divided out.
        """
        own, pull = own / self._noises[:, None], pull / self._noises[:, None]
        gain = self._effect * pull**2 / (1 + self._effect * own)
        return np.asarray(self._logs[:, None] + 0.5 * (gain - np.log1p(self._effect * own)))

    def _belief(self, point: int, cause: tuple[Floats, Floats] | None = None) -> Belief:
        scale, noise, shrunk = self._scales[point], self._noises[point], self._shrunk[point]

        def solved(column: Floats) -> Floats:
            """The inverse of the trials' covariance times `column`."""
            return np.asarray((column - self._left @ (shrunk * (self._left.T @ column))) / noise)

        def mean_of(solved_column: Floats) -> Floats:
            signal = scale * self._singular * (self._left.T @ solved_column)
            return np.asarray(self._across @ signal)

        answer = solved(self._values)
        mean = mean_of(answer)
        variance = scale * (self.model.squares - self._across**2 @ shrunk)
        if cause is not None:
            weighted = self._root * cause[0]
            known = solved(weighted)
            moved = cause[1] - mean_of(known)
            effect = self._effect / (1.0 + self._effect * float(weighted @ known))
            mean = mean + moved * (effect * float(weighted @ answer))
            variance = variance + moved**2 * effect
        sd = np.sqrt(np.maximum(variance, 0.0) + noise * self.model.scale**2)
        return Belief(mean, sd, float(np.sqrt(noise)))


def _log_sum(logs: Floats) -> Floats:
    """The logarithm of the sum over the first axis of what `logs` are logarithms of."""
    most = logs.max(axis=0)
    return np.asarray(most + np.log(np.sum(np.exp(logs - most), axis=0)))
