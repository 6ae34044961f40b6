"""Draws that a program repeats until all are within bounds: the values are not there to look at.

PyTorch 2.13's `trunc_normal_` draws again what lies outside, and asks the device whether anything
does. Of floats that nobody computes some always would.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import torch

from tuner.emulator.inside.aliases import SMALL


def draw_once(init: ModuleType) -> None:
    """Have `torch.nn.init` draw large tensors on the device twice, and then leave them."""
    module: Any = init
    original = module._no_grad_trunc_normal_
    if "while True" not in inspect.getsource(original):  # an older release: it needs no loop
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
