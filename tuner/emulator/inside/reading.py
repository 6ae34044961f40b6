"""Arguments of a CUDA operator as CPU tensors, and the operator computed on them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import empty

from tuner.emulator.inside.aliases import CPU, FLOATS, alias, is_known
from tuner.emulator.inside.made_up import NOISE_LIMIT, MadeUp
from tuner.emulator.inside.notes import MADE_UP, constant, noted, worst
from tuner.emulator.inside.operators import Operator
from tuner.emulator.inside.randomness import draw, seed_of
from tuner.emulator.inside.sparse import STRIDED, made_of, parts_of


class Reading:
    """Arguments of one call, as CPU tensors: aliases of what is known, noise for unknown floats."""

    __slots__ = ("guessed", "made_up", "origin", "seen", "unknown")

    def __init__(self, made_up: MadeUp | None) -> None:
        self.made_up = made_up  # None: nothing stands in for unknown floats
        self.guessed = False  # noise stands in for some floats
        self.seen: list[int] = []  # addresses of the tensors that noise stands in for
        self.unknown = False  # something is neither known nor stood in for
        self.origin: str | None = None  # what the worst of the values that were read rests on

    def value(self, value: Any) -> Any:
        """What the CPU operator gets for one argument."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        kind = type(value)
        if kind is list or kind is tuple:
            if value and not isinstance(value[0], int | float):
                return kind([self.value(one) for one in value])
        elif kind is torch.device:
            return CPU
        return value

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The CPU tensor for a CUDA tensor; others as they are."""
        if not tensor.is_cuda:
            return tensor
        if tensor.layout is not STRIDED:
            parts = [self.tensor(part) for part in parts_of(tensor)]
            return tensor if self.unknown else made_of(parts, tensor)
        note = noted(tensor)
        if note is not None and note.origin is not None:
            self.origin = worst(self.origin, note.origin)
        if is_known(tensor):
            return alias(tensor)
        one = None if note is None else constant(tensor, note)
        if one is not None:
            return one.expand(tensor.shape)
        if tensor.dtype in FLOATS and self.made_up is not None and tensor.numel() <= NOISE_LIMIT:
            self.guessed = True
            self.origin = MADE_UP
            address = tensor.data_ptr()
            if address not in self.seen:
                self.seen.append(address)
            return self.made_up.noise(tensor, self.seen.index(address))
        self.unknown = True
        return tensor

    def positional(self, operator: Operator, args: tuple[Any, ...]) -> list[Any]:
        """CPU values of positional arguments; stops at the first that has none."""
        values: list[Any] = []
        for position, value in enumerate(args):
            if self.unknown:
                break
            if position == 0 and operator.is_like:
                values.append(empty((), dtype=value.dtype).expand(value.shape))
            else:
                values.append(self.value(value))
        return values

    def named(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """CPU values of keyword arguments."""
        if not kwargs or self.unknown:
            return {}
        return {name: self.value(value) for name, value in kwargs.items() if name != "pin_memory"}


def compute(
    operator: Operator, args: list[Any], kwargs: dict[str, Any], device: torch.device
) -> Any:
    """What the operator returns for CPU arguments; raises what it raises."""
    if not operator.is_random:
        return operator.func(*args, **kwargs)
    generator = kwargs.pop("generator", None)
    seed = seed_of(generator, device)
    return draw(operator.func, args, kwargs, seed=seed, takes_generator=operator.takes_generator)


def mend(result: torch.Tensor, inputs: list[Any]) -> None:
    """Makes computed floats finite where nothing but made-up inputs explains that they are not."""
    if result.numel() == 0 or math.isfinite(float(result.sum(dtype=torch.float32))):
        return
    if all(_is_finite(one) for one in inputs):
        torch.nan_to_num_(result, nan=1.0, posinf=1.0, neginf=-1.0)


def _is_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value.layout is not STRIDED:
            return all(map(_is_finite, parts_of(value)))
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return all(_is_finite(one) for one in value)
    return True
