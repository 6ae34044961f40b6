"""The optimizers a configuration can name, built as their libraries' users build them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch

from tuner.errors import unknown

NAMES = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "sgd",
)


def build_optimizer(name: str, parameters: list[torch.nn.Parameter]) -> Any:
    """The optimizer that transformers' Trainer would build for `name`.

    `adamw_torch` runs the multi-tensor implementation, PyTorch's default on CUDA. Learning
    rates matter neither for memory nor for speed. Raises `InputError` for other names.
    """
    if name == "adamw_torch":
        return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    if name == "adamw_torch_fused":
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, foreach=True)
    import bitsandbytes.optim as bnb_optim

    if name == "adamw_8bit":
        return bnb_optim.AdamW8bit(parameters, lr=1e-4)
    if name == "paged_adamw_8bit":
        return bnb_optim.PagedAdamW8bit(parameters, lr=1e-4)
    if name == "paged_adamw_32bit":
        return bnb_optim.PagedAdamW32bit(parameters, lr=1e-4)
    raise unknown("optimizer", name, NAMES)


def unscale_without_data(parameters: Iterable[torch.nn.Parameter]) -> None:
    """What `GradScaler.unscale_` does to gradients, where there is no scale and no value.

    A scaler decides by values whether to update, so that a trace cannot have one; but the
    gradients are read and written once more than without it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    gradients.sort(key=lambda gradient: str(gradient.dtype))
    for _, alike in groupby(gradients, key=lambda gradient: gradient.dtype):
        listed = list(alike)
        found_inf, inverse_scale = (torch.empty(1, device=listed[0].device) for _ in range(2))
        torch._amp_foreach_non_finite_check_and_unscale_(listed, found_inf, inverse_scale)
