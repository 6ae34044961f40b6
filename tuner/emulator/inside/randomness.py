"""Random values on the CPU, decided by the state of the device's generator.

A CUDA operator moves its generator's offset on the host, so (seed, offset) names each draw: the
same seed gives the same values in every run, and a checkpoint that restores the state draws them
again. The program's own CPU generator is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_MASK = (1 << 63) - 1
_MIX = 0x9E3779B97F4A7C15  # an odd constant that spreads neighbouring states over all seeds


def seed_of(generator: torch.Generator | None, device: torch.device) -> int:
    """A seed for what the device's generator has just drawn."""
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
    """What `func` returns on the CPU with this seed."""
    if takes_generator:
        generator = torch.Generator().manual_seed(seed)
        return func(*args, **(kwargs | {"generator": generator}))
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        return func(*args, **kwargs)
    finally:
        torch.default_generator.set_state(state)
