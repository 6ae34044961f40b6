"""The memory that is to stay free, as people write it."""

from __future__ import annotations

import re

from tuner.core.errors import InputError
from tuner.core.gpu import Gpu
from tuner.core.units import parse_bytes

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


def parse_margin(text: str | None, gpu: Gpu, *, what: str = "margin") -> float | None:
    """The fraction of the memory of `gpu` that "3%" or "2GiB" is; None for None.

    Raises `InputError` for a number without unit (3 may be meant as 3 % or as 0.03), and for
    all of the memory or more.
    """
    if text is None:
        return None
    percent = _PERCENT.fullmatch(text)
    try:
        if percent:
            fraction = float(percent.group(1)) / 100
        else:
            fraction = parse_bytes(text) / gpu.memory_bytes
    except InputError:
        raise InputError(
            f"{what} {text!r} is not a share of the memory", hint="write for example 3% or 2GiB"
        ) from None
    if fraction >= 1:
        raise InputError(f"{what} {text!r} leaves nothing of the memory of {gpu.name}")
    return fraction
