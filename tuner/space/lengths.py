"""Lengths of examples, and their effect on truncation, padding and batches.

Two states of knowledge are kept apart. With a distribution (counted lengths, quantiles, a
histogram) every number is exact. With a mean and a maximum alone the distribution is unknown:
numbers are then intervals that hold for every distribution with that mean and maximum.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tuner.core.errors import InputError, unknown


def steps_per_epoch(
    rows: int,
    micro_batch: int,
    *,
    accumulation: int = 1,
    ranks: int = 1,
    drop_last: bool = False,
    split_batches: bool = False,
) -> int:
    """Optimizer steps of one pass over `rows`, which are packed rows where rows are packed.

    Ranks take turns at batches (accelerate's `BatchSamplerShard`) or share each with
    `split_batches`. A last, partial accumulation is a step (`Trainer.set_initial_training_values`
    of transformers 5.23). The order of the rows changes nothing. 0 where `drop_last` leaves no
    batch: Trainer then refuses to start.
    """
    batches = rows // micro_batch if drop_last else math.ceil(rows / micro_batch)
    if not split_batches:
        batches = batches // ranks if drop_last else math.ceil(batches / ranks)
    return math.ceil(batches / accumulation)


PADDING_MODES = ("longest", "max_length", "packing")
"""Contents of a micro-batch: examples padded to the longest among them, examples padded to
`max_length`, or rows of exactly `max_length` tokens cut from all examples laid end to end."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """A number known to lie between `low` and `high`; the same twice where it is known."""

    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> _Bounds:
        """A number that is known."""
        return cls(value, value)

    @property
    def value(self) -> float | None:
        """The number, or None where only an interval is known."""
        return self.low if self.low == self.high else None

    def to_dict(self) -> dict[str, float | None]:
        """JSON types: `value` is null where only `low` and `high` are known."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class _Truncation:
    """The loss by cutting examples at a length: shares in [0, 1]."""

    share_examples: _Bounds
    share_tokens: _Bounds


@dataclass(frozen=True, slots=True)
class _BatchShape:
    """The padded shape of a micro-batch, and how much of it is padding.

    Lengths in tokens. `expected_length` is the mean over batches and `worst_length` the longest
    that can occur. `padding_share` is padding over all tokens of an epoch (a ratio of two means,
    not a mean of ratios). `tokens_per_sample` are the non-padding tokens of an example that are
    trained on, `samples_per_sequence` the examples in one row (1 unless packed).
    """

    expected_length: _Bounds
    worst_length: int
    padding_share: _Bounds
    tokens_per_sample: _Bounds
    samples_per_sequence: _Bounds


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """The lengths of the examples in tokens.

    `points` is the cumulative distribution as (length, fraction of examples up to it), rising from
    fraction 0 to 1 and linear between; two points at one length are a jump. It is empty where only
    `mean` and `max` are known. `examples` is None where the number of examples is not known.
    """

    mean: float
    max: int
    points: tuple[tuple[float, float], ...] = ()
    examples: int | None = field(default=None, repr=False)
    """Not in the `repr`, whose digest stands in the version of a trained model."""

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> TokenLengths:
        """The distribution of counted lengths, in any order.

        Raises `InputError` for no lengths, negative ones, and when no example has a token.
        """
        return cls.from_counts(Counter(lengths))

    @classmethod
    def from_counts(cls, counts: Mapping[int, int]) -> TokenLengths:
        """The distribution of `counts` examples by length. Raises as `from_lengths`."""
        lengths = sorted(length for length, count in counts.items() if count)
        examples = sum(counts.values())
        if not lengths:
            raise InputError("there are no token lengths")
        if lengths[0] < 0:
            raise InputError(f"token length {lengths[0]} is negative")
        if lengths[-1] == 0:
            raise InputError("no example has a token")
        upto = [0, *itertools.accumulate(counts[length] for length in lengths)]
        jumps = zip(lengths, itertools.pairwise(upto), strict=True)
        return cls(
            mean=sum(length * counts[length] for length in lengths) / examples,
            max=lengths[-1],
            points=tuple((float(x), part / examples) for x, parts in jumps for part in parts),
            examples=examples,
        )

    @classmethod
    def from_points(cls, points: Sequence[tuple[float, float]]) -> TokenLengths:
        """The distribution through points of its cumulative function.

        Raises `InputError` unless lengths and fractions rise together and end at fraction 1.
        """
        kept = tuple((float(length), float(fraction)) for length, fraction in points)
        if not all(math.isfinite(number) for point in kept for number in point):
            raise InputError("lengths and fractions must be finite numbers")
        if any(a[0] > b[0] or a[1] > b[1] for a, b in itertools.pairwise(kept)):
            raise InputError("lengths and fractions must rise together")
        if not kept or kept[-1][1] != 1:
            raise InputError("the points must end at fraction 1, the longest example")
        if kept[0][0] < 0 or kept[0][1] < 0:
            raise InputError("lengths and fractions cannot be negative")
        if kept[0][1] > 0:  # a jump at the shortest example
            kept = ((kept[0][0], 0.0), *kept)
        # Further points at fraction 1 do not lengthen the longest example.
        end = next(i for i, point in enumerate(kept) if point[1] == 1)
        kept, longest = kept[: end + 1], kept[end][0]
        if longest == 0:
            raise InputError("no example has a token")
        return cls(_mean_of_longest(kept, 1, longest), math.ceil(longest), kept)

    @classmethod
    def from_summary(cls, *, mean: float, longest: int) -> TokenLengths:
        """Lengths of which mean and maximum are all that is known.

        Raises `InputError` unless 0 < mean <= longest.
        """
        if mean > longest:
            raise InputError(f"mean {mean:g} is more than max {longest}")
        if not mean > 0:
            raise InputError(f"mean {mean:g} must be above 0")
        return cls(float(mean), longest)

    @property
    def known(self) -> bool:
        """True if the whole distribution is known, not only its mean and maximum."""
        return bool(self.points)

    @property
    def tokens(self) -> float | None:
        """Tokens of all examples; None where their number is not known."""
        return None if self.examples is None else self.examples * self.mean

    def truncation(self, max_length: int) -> _Truncation:
        """The loss by cutting every example at `max_length` tokens.

        Examples: 1 - F(T) at T = max_length. Tokens: 1 - E[min(X, T)] / E[X]. From mean m and
        maximum M alone, for T < M: at most m / (T + 1) of the examples are longer (Markov's
        inequality, lengths being whole) and at least (m - T) / (M - T), because
        m <= T (1 - p) + M p.
        """
        _check_positive(max_length=max_length)
        if max_length >= self.max:
            return _Truncation(_Bounds.exactly(0.0), _Bounds.exactly(0.0))
        kept = self.kept_tokens(max_length)
        # The division may leave a rounding error on the wrong side of 0.
        lost = _Bounds(*(max(0.0, 1 - tokens / self.mean) for tokens in (kept.high, kept.low)))
        if self.known:
            return _Truncation(_Bounds.exactly(1 - self.share_up_to(max_length)), lost)
        least = max(0.0, (self.mean - max_length) / (self.max - max_length))
        most = min(1.0, self.mean / (max_length + 1))
        return _Truncation(_Bounds(min(least, most), most), lost)

    def kept_tokens(self, max_length: int) -> _Bounds:
        """E[min(X, T)]: tokens of an example that are left when all are cut at T = max_length.

        From mean m and maximum M alone it is between m min(T, M) / M (all examples empty or
        of the maximum) and min(m, T) (all examples alike): min(x, T) is concave in x.
        """
        _check_positive(max_length=max_length)
        if max_length >= self.max:
            return _Bounds.exactly(self.mean)
        if self.known:
            return _Bounds.exactly(_mean_of_longest(self.points, 1, max_length))
        most = min(self.mean, float(max_length))
        return _Bounds(min(self.mean * max_length / self.max, most), most)

    def batch(self, micro_batch: int, max_length: int, padding: str = "longest") -> _BatchShape:
        """The shape of micro-batches of `micro_batch` rows at most `max_length` long.

        `padding` is one of `PADDING_MODES`. Examples are taken to be drawn independently;
        shuffling without replacement differs by the order of micro_batch / examples.
        Raises `InputError` for another padding mode, `ValueError` for sizes below 1.
        """
        _check_positive(micro_batch=micro_batch, max_length=max_length)
        if padding == "longest":
            return self._padded_to_longest(micro_batch, max_length)
        if padding == "max_length":
            kept = self.kept_tokens(max_length)
            share = _Bounds(1 - kept.high / max_length, 1 - kept.low / max_length)
            return _fixed_length(max_length, share, kept, _Bounds.exactly(1.0))
        if padding == "packing":
            # Examples laid end to end and cut: an example that does not fit goes on in the next
            # row, so nothing is lost or padded but the end of the last row of an epoch. Packing
            # that keeps examples whole wastes more, and truncates those above max_length.
            per_row = _Bounds.exactly(max_length / self.mean)
            mean = _Bounds.exactly(self.mean)
            return _fixed_length(max_length, _Bounds.exactly(0.0), mean, per_row)
        raise unknown("padding", padding, PADDING_MODES)

    def _padded_to_longest(self, micro_batch: int, max_length: int) -> _BatchShape:
        """Rows padded to the longest of their batch: E[max] = integral of 1 - F^m up to T.

        With the distribution unknown and v = E[min(X, T)], T' = min(T, M): E[max] is least
        when all examples are v long, and most when they are empty or T' long, which gives
        T' (1 - (1 - v / T')^m), since 1 - (1 - u)^m is concave in u = 1 - F (Jensen).
        """
        kept = self.kept_tokens(max_length)
        worst = min(max_length, self.max)
        if self.known:
            mean = _mean_of_longest(self.points, micro_batch, max_length)
            mean = min(max(mean, kept.low), worst)
            expected = _Bounds.exactly(mean)
            share = _Bounds.exactly(1 - kept.low / mean)
        elif micro_batch == 1:
            expected, share = kept, _Bounds.exactly(0.0)
        else:
            high = _reach(kept.high / worst, micro_batch)
            expected = _Bounds(kept.low, max(worst * high, kept.low))
            filled = kept.low / worst
            share = _Bounds(0.0, max(0.0, 1 - filled / _reach(filled, micro_batch)))
        return _BatchShape(expected, worst, share, kept, _Bounds.exactly(1.0))

    def steps_per_epoch(
        self, effective_batch: int, max_length: int, padding: str = "longest"
    ) -> int | None:
        """Optimizer steps of one pass over the data; None if the examples are not counted.

        Packed rows are ceil(tokens / max_length) in number.
        """
        _check_positive(effective_batch=effective_batch, max_length=max_length)
        if padding not in PADDING_MODES:
            raise unknown("padding", padding, PADDING_MODES)
        if self.examples is None or self.tokens is None:
            return None
        if padding != "packing":
            return steps_per_epoch(self.examples, effective_batch)
        # The mean of counted lengths is a rounded quotient; its multiple is whole again.
        tokens = round(self.tokens) if self.known else self.tokens
        return steps_per_epoch(math.ceil(tokens / max_length), effective_batch)

    def share_up_to(self, length: float) -> float:
        """Fraction of examples with at most `length` tokens, if the distribution is known."""
        i = bisect.bisect_right(self.points, length, key=lambda point: point[0])
        if i in (0, len(self.points)):
            return 1.0 if i else 0.0
        (start, below), (end, above) = self.points[i - 1 : i + 1]
        return below + (above - below) * (length - start) / (end - start)


def _mean_of_longest(points: Sequence[tuple[float, float]], draws: int, most: float) -> float:
    """E[min(M, most)] of the maximum M of independent `draws`.

    M is at most x when all draws are, so its distribution function is F(x)^draws, and the mean of
    a non-negative variable is the integral of 1 - F(x)^draws from 0 to `most` (order statistics:
    David and Nagaraja, Order Statistics, 3rd edition, section 2.1).
    """
    total = min(points[0][0], most)
    for (start, below), (end, above) in itertools.pairwise(points):
        if start >= most or end == start:
            continue
        stop = min(end, most)
        at_stop = below + (above - below) * (stop - start) / (end - start)
        total += (stop - start) * (1 - _mean_power(below, at_stop, draws))
    return total


def _mean_power(low: float, high: float, power: int) -> float:
    """Mean of u^power for u uniform between `low` and `high`, each in [0, 1].

    (high^n - low^n) / (n (high - low)) with n = power + 1, written so that nothing cancels where
    the two are close: with d = 1 - low / high it is high^power (1 - (1 - d)^n) / (n d).
    """
    if power == 1:
        return (low + high) / 2
    n, share = power + 1, (high - low) / high if high > 0 else 0.0
    return high**power * (_reach(share, n) / (n * share) if share > 0 else 1.0)


def _reach(share: float, draws: int) -> float:
    """1 - (1 - share)^draws, exact for small shares."""
    return 1.0 if share >= 1 else -math.expm1(draws * math.log1p(-share))


def _fixed_length(length: int, padding: _Bounds, tokens: _Bounds, per_row: _Bounds) -> _BatchShape:
    return _BatchShape(_Bounds.exactly(float(length)), length, padding, tokens, per_row)


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} {size} is below 1")
