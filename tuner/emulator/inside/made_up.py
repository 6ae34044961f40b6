"""Made-up values for results that are not computed: finite, plausible and the same in every run.

Unknown floats are treated as noise around 0, all different (settling.py compares them). A few
floats computed from many unknown ones (a loss, a norm) become about 1. Indices that an operator
would choose by unknown floats (top-k, argmax, sampling) go round all candidates, so that experts
get equal loads.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import arange, empty, randn

from tuner.emulator.inside.notes import FLOATS, MADE_UP, SMALL, alias, note_origin

_MASK = (1 << 63) - 1
_MIX = 0x9E3779B97F4A7C15  # an odd constant that spreads neighbouring states over all seeds


def seed_of(generator: torch.Generator | None, device: torch.device) -> int:
    """A seed that stands for the last draw of the device's generator."""
    if generator is None or generator.device.type != "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        generator = torch.cuda.default_generators[index]
    state = generator.initial_seed() * 31 + generator.get_offset()
    return (state * _MIX) & _MASK


def draw(
    func: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    *,
    seed: int,
    takes_generator: bool,
) -> Any:
    """The result of `func` on the CPU with this seed."""
    if takes_generator:
        generator = torch.Generator().manual_seed(seed)
        return func(*args, **(kwargs | {"generator": generator}))
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        return func(*args, **kwargs)
    finally:
        torch.default_generator.set_state(state)


_TILE = 1 << 20
# Comparisons of more unknown floats than this are not made up.
NOISE_LIMIT = 1 << 22
_PRIME = 7919
_FEW = 16
_KEYWORD = 99  # no position: only a keyword
# Around 1 with little spread: sums of logs, roots and quotients of these stay finite.
_MEAN, _SPREAD = 1.0, 0.05

Spread = Callable[[tuple[Any, ...], dict[str, Any], Any], None]


class MadeUp:
    """A seeded source of made-up values."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn = seed
        self._noise: torch.Tensor | None = None
        self._ones: torch.Tensor | None = None

    def noise(self, tensor: torch.Tensor, which: int = 0) -> torch.Tensor:
        """Normal noise of the shape of `tensor`, on the CPU; at most `NOISE_LIMIT` elements.

        The same shape gives the same noise, because a checkpoint must recompute the same values.
        Tensors of one call differ by `which`.
        """
        count = tensor.numel()
        if self._noise is None:
            generator = torch.Generator().manual_seed(self._seed)
            self._noise = randn(_TILE, generator=generator)
        noise = self._noise
        if which:
            noise = noise.roll(which * _PRIME)
        if count > _TILE:
            noise = noise.repeat(-(-count // _TILE))
        return noise[:count].view(tensor.shape)

    def write_finite(self, tensor: torch.Tensor) -> None:
        """Writes finite values about 1 to a CUDA or CPU tensor of at most `SMALL` floats.

        Up to `_FEW` floats (losses, norms) differ from call to call; more are the same, as in
        `noise`.
        """
        count = tensor.numel()
        if count == 0 or count > SMALL:
            return
        if self._ones is None:
            generator = torch.Generator().manual_seed(self._seed)
            noise = randn(2 * SMALL, generator=generator).clamp(-3, 3)
            self._ones = _MEAN + _SPREAD * noise
        start = 0
        if count <= _FEW:
            self._drawn = start = (self._drawn + _PRIME) % SMALL
        target = tensor
        if tensor.is_cuda:
            target = alias(tensor)
            note_origin(tensor, MADE_UP)
        target.copy_(self._ones[start : start + count].view(tensor.shape))

    def fill_host(self, tensor: torch.Tensor) -> None:
        """Fills a CPU tensor of floats with finite noise."""
        count = tensor.numel()
        flat = self.noise(empty(min(count, _TILE)))
        if count > _TILE:
            flat = flat.repeat(-(-count // _TILE))[:count]
        tensor.copy_(flat.view(tensor.shape))

    def number(self) -> float:
        """One finite value about 1."""
        one = empty(())
        self.write_finite(one)
        return float(one)

    def indices(self, shape: tuple[int, ...], width: int, start: int | None = None) -> torch.Tensor:
        """Indices below `width`: all different within a row, and all equally frequent overall.

        Without `start` the same shape gives the same indices, as in `noise`.
        """
        count = math.prod(shape)
        width = max(width, 1)
        step = max(1, int(width * 0.618))  # near the golden section, and visits every index once
        while math.gcd(step, width) != 1:
            step += 1
        row = shape[-1] if shape else 1
        flat = arange(count, dtype=torch.int64)
        if row >= width:  # whole permutations: all rows would be the same otherwise
            flat += arange(count, dtype=torch.int64) // max(row, 1)
        return (
            flat.mul_(step)
            .add_((width // 3 if start is None else start) % width)
            .remainder_(width)
            .view(shape)
        )


def _argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any
) -> Any:
    if len(args) > position:
        return args[position]
    return kwargs.get(name, default)


def _write_along(
    made_up: MadeUp, out: torch.Tensor, width: int, dim: int, start: int | None = None
) -> None:
    """Writes indices to `out` that differ from each other along `dim`."""
    if out.numel() == 0:
        return
    target = alias(out)
    if target.dim() > 0:
        target = target.movedim(dim, -1)
    target.copy_(made_up.indices(tuple(target.shape), width, start))


def _chosen(
    made_up: MadeUp, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, dim_at: int
) -> None:
    """Fill the (values, indices) of sort, top-k and kthvalue along a dimension of `out`."""
    values, indices = out
    source = args[0]
    dim = _argument(args, kwargs, dim_at, "dim", -1)
    width = source.shape[dim] if source.dim() else 1
    _write_along(made_up, indices, width, dim)
    if values.dtype in FLOATS:
        made_up.write_finite(values)


def _best(made_up: MadeUp, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Fill the result of argmax and the like: (values, indices) or indices, one per row."""
    source = args[0]
    dim = _argument(args, kwargs, 1, "dim", None)
    width = source.numel() if dim is None else (source.shape[dim] if source.dim() else 1)
    indices = out
    if not isinstance(out, torch.Tensor):
        values, indices = out
        if values.dtype in FLOATS:
            made_up.write_finite(values)
    flat = made_up.indices((indices.numel(), 1), width)
    alias(indices).copy_(flat.view(indices.shape))


def spreads(made_up: MadeUp) -> dict[str, Spread]:
    """By operator: the function that writes indices which depend on unknown floats."""

    def chosen(dim_at: int) -> Spread:
        return lambda args, kwargs, out: _chosen(made_up, args, kwargs, out, dim_at)

    def best(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        _best(made_up, args, kwargs, out)

    def sampled(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        start = seed_of(kwargs.get("generator"), out.device)
        _write_along(made_up, out, args[0].shape[-1], -1, start)

    def solved(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        made_up.write_finite(out[0])
        alias(out[1]).zero_()  # no error

    return {
        "aten::linalg_cholesky_ex": solved,
        "aten::linalg_inv_ex": solved,
        "aten::topk": chosen(2),
        "aten::sort": chosen(1),
        "aten::sort.stable": chosen(_KEYWORD),
        "aten::argmax": best,
        "aten::argmin": best,
        "aten::max.dim": best,
        "aten::min.dim": best,
        "aten::median.dim": best,
        "aten::nanmedian.dim": best,
        "aten::mode": best,
        "aten::multinomial": sampled,
    }


def draw_once(init: ModuleType) -> None:
    """Have `torch.nn.init` draw large tensors on the device twice instead of in a loop."""
    module: Any = init
    original = module._no_grad_trunc_normal_
    if "while True" not in inspect.getsource(original):  # an older release, without a loop
        return

    def trunc_normal(
        tensor: torch.Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if not tensor.is_cuda or tensor.numel() <= SMALL:
            out: torch.Tensor = original(tensor, mean, std, a, b, generator=generator)
            return out
        with torch.no_grad():
            tensor.normal_(mean, std, generator=generator)
            again = torch.empty_like(tensor).normal_(mean, std, generator=generator)
            return tensor.copy_(torch.where((tensor < a) | (tensor > b), again, tensor))

    module._no_grad_trunc_normal_ = trunc_normal
