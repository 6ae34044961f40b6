"""Sizes of samples that follow from a configuration alone; needs no torch."""

from __future__ import annotations

from tuner.core.records import Configuration, KnobValue


def contrastive_tokens(configuration: Configuration) -> int:
    """Tokens of an anchor, a positive and the negatives, over all channels."""
    channels, short = (_listed(configuration[n]) for n in ("channels", "short_channels"))
    long_length, short_length = (
        int(str(configuration[name])) for name in ("max_length", "short_length")
    )
    per_text = sum(short_length if name in short else long_length for name in channels)
    return (2 + int(str(configuration["n_negatives"]))) * per_text


def _listed(value: KnobValue) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (str(value),)
