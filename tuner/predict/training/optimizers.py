"""The optimizers a configuration can name, built as their libraries' users build them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from tuner.core.errors import unknown
from tuner.core.setup.optimizers import OPTIMIZERS
from tuner.predict.training import load_object


def build_optimizer(
    name: str,
    parameters: list[torch.nn.Parameter],
    embeddings: Sequence[torch.nn.Parameter] = (),
) -> Any:
    """The optimizer that transformers' Trainer would build for `name`.

    Of `embeddings`, some of `parameters`, optimizers in 8 bits keep their state in fp32 too, as
    `Trainer.create_optimizer` asks them to. Learning rates matter neither for memory nor for
    speed. Raises `InputError` for other names.
    """
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    row = OPTIMIZERS[name]
    optimizer = load_object(row.path, "optimizer")(parameters, lr=1e-4, **row.options)
    if embeddings and getattr(getattr(optimizer, "args", None), "optim_bits", None) == 8:
        optimizer.mng = _manager_of(embeddings)
    return optimizer


def embedding_weights(model: nn.Module) -> list[torch.nn.Parameter]:
    """The weights of `model`'s embeddings that are trained; tied ones once."""
    weights = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    return [p for p in model.parameters() if p.requires_grad and p in weights]


def _manager_of(embeddings: Sequence[torch.nn.Parameter]) -> Any:
    """What tells bitsandbytes' optimizers which states to keep in 32 bits.

    One of its own: bitsandbytes has a single one, which knows parameters by addresses that those
    of the next model may have.
    """
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.__new__(GlobalOptimManager)
    manager.initialize()
    manager.override_config(list(embeddings), "optim_bits", 32)
    return manager


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
