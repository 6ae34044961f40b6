"""Tensors with one value everywhere: constants of any size, and comparisons of unknown floats.

A constant is noted on its storage, and costs no memory. A comparison of unknown floats is true
everywhere, so that it selects as much as possible: `x[x > 0]` keeps all of x, noted as "at most".
Equalities of unknown floats are false, and all unknown floats are finite. Few booleans are written
with one fill; more of them are noted.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import empty

from tuner.emulator.inside.lines import calling_package
from tuner.emulator.inside.made_up import MadeUp
from tuner.emulator.inside.notes import (
    ASSUMED,
    AT_MOST,
    FLOATS,
    LIMITS,
    MADE_UP,
    MEDIUM,
    SMALL,
    UNIFORM,
    alias,
    constant,
    forget_note,
    is_known,
    note_known,
    note_origin,
    note_uniform,
    noted,
    worst,
)
from tuner.emulator.inside.operators import (
    CHOOSING,
    COPYING,
    FINITE,
    GROWING,
    LARGEST,
    MEETING,
    SMALLER,
    Operator,
)

# This many made-up floats stand for all unknown floats in a comparison.
SAMPLE = 4096
# LLM.int8() treats columns with values from 6 on apart: none is assumed to have any.
_NO_OUTLIERS = "bitsandbytes"


def compare(operator: Operator, args: tuple[Any, ...], out: torch.Tensor, made_up: MadeUp) -> bool:
    """Writes the result of a comparison of unknown floats; False if the floats are known."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if not any(_is_open(tensor, alone=len(tensors) == 1) for tensor in tensors):
        return False
    sample = _on_sample(operator, args, made_up)
    value, origin = bool(sample.all()), ASSUMED
    if operator.name not in FINITE and _may_differ(tensors, args):
        if operator.orders:
            value = bool(sample.any()) or calling_package() != _NO_OUTLIERS
        origin = AT_MOST if value else ASSUMED if operator.orders else MADE_UP
    fill(out, value, origin)
    return True


def _is_open(tensor: torch.Tensor, *, alone: bool) -> bool:
    """True if a comparison with these floats has no computed result.

    Few floats, which may be made up, are compared as they are, except several made-up ones with a
    number.
    """
    if not tensor.is_cuda or tensor.dtype not in FLOATS:
        return False
    note = noted(tensor)
    if note is not None and note.state == UNIFORM:
        return False
    made_up = note is not None and note.origin is not None and alone and tensor.numel() > 1
    return made_up or not is_known(tensor)


def _may_differ(tensors: list[torch.Tensor], args: tuple[Any, ...]) -> bool:
    """False if the result cannot depend on the values: with infinity, or with themselves."""
    if any(isinstance(value, float) and not math.isfinite(value) for value in args):
        return False
    return len(tensors) < 2 or tensors[0].data_ptr() != tensors[1].data_ptr()


def _on_sample(operator: Operator, args: tuple[Any, ...], made_up: MadeUp) -> torch.Tensor:
    """The operator's result on noise; equal tensors get equal noise."""
    values: list[Any] = []
    seen: list[int] = []
    for value in args:
        if not isinstance(value, torch.Tensor):
            values.append(value)
        elif value.numel() == 1 and (not value.is_cuda or is_known(value)):
            values.append(alias(value) if value.is_cuda else value)
        else:
            address = value.data_ptr()
            if address not in seen:
                seen.append(address)
            values.append(made_up.noise(empty(SAMPLE), seen.index(address)))
    result: torch.Tensor = operator.func(*values)
    return result


def combine(operator: Operator, args: tuple[Any, ...], out: torch.Tensor) -> bool:
    """Writes the booleans that follow from constants; False if a tensor is not a constant."""
    values: list[Any] = []
    origin: str | None = None
    for value in args:
        if isinstance(value, torch.Tensor):
            note = noted(value) if value.is_cuda else None
            one = None if note is None else constant(value, note)
            if note is None or one is None:
                return False
            values.append(one)
            origin = worst(origin, note.origin)
        else:
            values.append(value)
    if not values or not isinstance(values[0], torch.Tensor):
        return False
    result = bool(values[0] if operator.reduces else operator.func(*values))
    fill(out, result, after(operator, origin, out))
    return True


def carry(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor
) -> None:
    """Notes that `out`, computed from a constant, is a constant."""
    source = args[0]
    if not isinstance(source, torch.Tensor) or not source.is_cuda or not out.is_cuda:
        return
    note = noted(source)
    one = None if note is None else constant(source, note)
    if one is None or any(isinstance(value, torch.Tensor) for value in args[1:]):
        return
    if operator.name not in COPYING:
        one = operator.func(one, *args[1:], **kwargs)
    note_uniform(out, one.to(out.dtype).item())


def after(
    operator: Operator, origin: str | None, out: torch.Tensor, *, is_bounded: bool = False
) -> str | None:
    """The origin of a result whose inputs have the origin `origin` at worst.

    `is_bounded` if some are at most as large as they seem.
    """
    if origin is None:
        return None
    name = operator.functional_name
    if origin == ASSUMED and name in LARGEST and out.dtype not in FLOATS:
        return MADE_UP  # even choices say nothing of the largest load
    if name in FINITE or (name in CHOOSING and out.dtype not in FLOATS):
        return ASSUMED
    is_bounded = is_bounded or origin == AT_MOST
    return MADE_UP if is_bounded and name not in GROWING else origin


def of_choices(operator: Operator, args: list[Any], result: torch.Tensor) -> str:
    """The origin of booleans that are computed from even choices.

    Where choices meet labels or another mask, no bound is known. Counts that are compared with a
    number tell how many candidates were chosen: even choices choose the most, and a rank is below a
    number as often as there are ranks.
    """
    first = args[0]
    tensors = [one for one in args if isinstance(one, torch.Tensor) and one.dim()]
    if operator.name in MEETING and len(tensors) > 1 and tensors[0].shape == tensors[1].shape:
        return MADE_UP
    if not operator.orders or not isinstance(first, torch.Tensor):
        return ASSUMED
    if operator.name in SMALLER and result.all():
        return AT_MOST
    ranks = torch.arange(first.shape[-1] if first.dim() else 0)
    if first.dim() and torch.equal(
        first.sort(-1).values, ranks.to(first.dtype).expand(first.shape)
    ):
        return ASSUMED
    most = min(first.numel(), int(first.sum()))
    is_most = operator.name not in SMALLER and int(result.sum()) == most
    return ASSUMED if is_most else MADE_UP


def fill(out: torch.Tensor, value: Any, origin: str | None = None) -> None:
    """Gives a new tensor one value everywhere: few elements are written, more are noted."""
    if not out.numel():
        return
    if out.numel() <= (SMALL if out.dtype in FLOATS else LIMITS.get(out.dtype, 0)):
        alias(out).fill_(value)
        note_origin(out, origin)
    else:
        note_uniform(out, value, origin)


def write_out(tensor: torch.Tensor) -> bool:
    """Writes a constant into memory, so that parts of it can change; False if it is large."""
    note = noted(tensor)
    one = None if note is None else constant(tensor, note)
    count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    if note is None or one is None or count > (MEDIUM if tensor.dtype in FLOATS else 0):
        return False
    alias(tensor.as_strided((count,), (1,), 0)).copy_(one.expand(count))
    forget_note(tensor)
    note_known(tensor)
    note_origin(tensor, note.origin)
    return True
