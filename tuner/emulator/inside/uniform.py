"""Booleans of many unknown floats: `isfinite(logits).all()` must be true, and cost nothing.

What a comparison of unknown floats would say is found on a sample of them. Where it is the same
everywhere, it is written with one fill; of more booleans than are computed it is noted on the
storage, and `&`, `|`, `any`, `all` and the like work on the notes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import empty, full

from tuner.emulator.inside.aliases import (
    FLOATS,
    LIMITS,
    alias,
    is_known,
    note_uniform,
    note_unknown,
    noted,
)
from tuner.emulator.inside.made_up import MadeUp
from tuner.emulator.inside.operators import Operator

# Comparisons of fewer floats are computed on noise of their own size.
SAMPLE = 65_536


def compare(operator: Operator, args: tuple[Any, ...], out: torch.Tensor, made_up: MadeUp) -> bool:
    """Writes what a comparison of unknown floats gives; False where it is none, or has others."""
    values: list[Any] = []
    seen: list[int] = []
    for value in args:
        if not isinstance(value, torch.Tensor):
            values.append(value)
        elif value.numel() == 1 and (not value.is_cuda or is_known(value)):
            values.append(alias(value) if value.is_cuda else value)
        elif value.dtype in FLOATS and value.shape == out.shape:
            address = value.data_ptr()
            if address not in seen:
                seen.append(address)
            values.append(made_up.noise(empty(SAMPLE), seen.index(address)))
        else:
            return False
    sample = operator.func(*values)
    if bool(sample.all()) or not bool(sample.any()):
        _fill(out, value=bool(sample[0]))
    elif out.numel() <= LIMITS[torch.bool]:
        repeated = sample.repeat(-(-out.numel() // SAMPLE))
        alias(out).copy_(repeated[: out.numel()].view(out.shape))
    else:
        note_unknown(out)
    return True


def combine(operator: Operator, args: tuple[Any, ...], out: torch.Tensor) -> bool:
    """Writes what a logical operator gives for booleans that are each the same everywhere."""
    values: list[torch.Tensor] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            note = noted(value) if value.is_cuda else None
            if note not in {"true", "false"}:
                return False
            values.append(full((), note == "true"))
    if not values:
        return False
    result = values[0] if operator.reduces else operator.func(*values)
    _fill(out, value=bool(result))
    return True


def _fill(out: torch.Tensor, *, value: bool) -> None:
    if out.numel() <= LIMITS[torch.bool]:
        alias(out).fill_(value)
    else:
        note_uniform(out, value=value)
