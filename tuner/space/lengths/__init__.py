"""Token lengths of the training data, and the batches made of them."""

from __future__ import annotations

from tuner.space.lengths.distribution import (
    PADDING_MODES,
    BatchShape,
    Bounds,
    LengthDistribution,
    Truncation,
)
from tuner.space.lengths.read import read_lengths

__all__ = [
    "PADDING_MODES",
    "BatchShape",
    "Bounds",
    "LengthDistribution",
    "Truncation",
    "read_lengths",
]
