"""Token lengths of the training data, and what batches made of them look like."""

from __future__ import annotations

from tuner.data.distribution import (
    PADDING_MODES,
    BatchShape,
    Bounds,
    LengthDistribution,
    Truncation,
)
from tuner.data.read import read_lengths

__all__ = [
    "PADDING_MODES",
    "BatchShape",
    "Bounds",
    "LengthDistribution",
    "Truncation",
    "read_lengths",
]
