"""The optimizers a configuration can name, built as their libraries' users build them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch

from tuner.errors import unknown
from tuner.space.optimizers import OPTIMIZERS
from tuner.workloads import load_object


def build_optimizer(name: str, parameters: list[torch.nn.Parameter]) -> Any:
    """The optimizer that transformers' Trainer would build for `name`.

    Learning rates matter neither for memory nor for speed. Raises `InputError` for other names.
    """
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    optimizer = OPTIMIZERS[name]
    return load_object(optimizer.path, "optimizer")(parameters, lr=1e-4, **optimizer.options)


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
