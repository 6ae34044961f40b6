"""Non-padding tokens per second, when the time of a step depends on its padded length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tuner.data.distribution import Bounds, LengthDistribution

DEFAULT_NODES = 16
"""Intervals between the lengths at which the time of a step is asked for. The time is then
taken as linear between neighbours: for attention's quadratic part the error falls with the
square of the number."""


@dataclass(frozen=True, slots=True)
class TokenRate:
    """Speed over an epoch in which every batch has its own length.

    `tokens_per_s` counts no padding. `step_s` is the mean time of an optimizer step, and
    `lengths` the padded lengths in tokens for which it was asked.
    """

    tokens_per_s: Bounds
    samples_per_s: Bounds
    step_s: Bounds
    lengths: tuple[int, ...]


def token_rate(
    lengths: LengthDistribution,
    step_s: Callable[[int], float],
    *,
    micro_batch: int,
    max_length: int,
    padding: str = "longest",
    grad_accum: int = 1,
    nodes: int = DEFAULT_NODES,
) -> TokenRate:
    """The speed of training on `lengths`, given `step_s(length)`.

    `step_s` is the time in seconds of one optimizer step of `grad_accum` micro-batches that
    are all padded to `length`; the time of a step of unequal micro-batches is taken as the
    mean over them, which holds where micro-steps run one after the other.

    The mean of `step_s` over batches, interpolated between nodes n_0 < n_1 < ..., is
    step_s(n_0) + sum of slope_j times the integral of 1 - F^m from n_j to n_(j+1): exact where
    step_s is linear between nodes, and an upper end where it is convex. The rate is a ratio of
    means, tokens of an epoch over its time. With the distribution unknown, bounds are given
    under the condition that step_s does not fall, and tokens/s of a full batch do not turn
    between the nodes.
    """
    shape = lengths.batch(micro_batch, max_length, padding)
    samples = micro_batch * grad_accum * (shape.samples_per_sequence.value or 1.0)
    if padding != "longest":
        return _constant(shape.tokens_per_sample, samples, max_length, step_s(max_length))
    if not lengths.known:
        return _unknown(
            shape.tokens_per_sample, samples, _spread(shape.worst_length, nodes), step_s
        )
    at = _batch_lengths(lengths, micro_batch, shape.worst_length, nodes)
    times = [step_s(length) for length in at]
    mean_s = times[0]
    for i in range(1, len(at)):
        reached = lengths.cdf.survival(micro_batch, at[i - 1], at[i])
        mean_s += (times[i] - times[i - 1]) / (at[i] - at[i - 1]) * reached
    rate = _constant(shape.tokens_per_sample, samples, at[0], mean_s)
    return TokenRate(rate.tokens_per_s, rate.samples_per_s, rate.step_s, at)


def _batch_lengths(
    lengths: LengthDistribution, micro_batch: int, worst: int, nodes: int
) -> tuple[int, ...]:
    """Quantiles of the padded length of a batch, from its shortest to its longest, whole."""
    probabilities = np.linspace(0.0, 1.0, max(nodes, 1) + 1)
    found = np.minimum(lengths.cdf.quantiles_of_max(micro_batch, probabilities), worst)
    # The ends must enclose every batch: down to the shortest, up to the longest.
    shortest = min(int(lengths.points[0][0]), worst)
    inner = {round(length) for length in found.tolist()}
    return tuple(sorted({max(1, n) for n in (shortest, *inner, worst)}))


def _spread(worst: int, nodes: int) -> tuple[int, ...]:
    """Lengths from 1 to `worst`, each by the same factor above the one before."""
    return tuple(sorted({round(n) for n in np.geomspace(1, worst, max(nodes, 1) + 1).tolist()}))


def _constant(tokens: Bounds, samples: float, length: int, time_s: float) -> TokenRate:
    return TokenRate(
        tokens_per_s=Bounds(samples * tokens.low / time_s, samples * tokens.high / time_s),
        samples_per_s=Bounds.exactly(samples / time_s),
        step_s=Bounds.exactly(time_s),
        lengths=(length,),
    )


def _unknown(
    tokens: Bounds, samples: float, at: tuple[int, ...], step_s: Callable[[int], float]
) -> TokenRate:
    """Bounds for every distribution: no batch is faster than a full one of its own length."""
    times = {length: step_s(length) for length in at}
    fastest_s, slowest_s = times[at[0]], times[at[-1]]
    high = max(samples * length / time_s for length, time_s in times.items())
    return TokenRate(
        tokens_per_s=Bounds(min(samples * tokens.low / slowest_s, high), high),
        samples_per_s=Bounds(samples / slowest_s, samples / fastest_s),
        step_s=Bounds(fastest_s, slowest_s),
        lengths=at,
    )
