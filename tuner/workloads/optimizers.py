"""The optimizers a configuration can name, built as their libraries' users build them."""

from __future__ import annotations

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
