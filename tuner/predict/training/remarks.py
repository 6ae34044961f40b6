"""What libraries leave out of a model that its configuration asks for, in words for people."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tuner.predict.training.quantized import kept_whole
from tuner.space.models.trainable import trained_class


def remarks(model: Any) -> tuple[str, ...]:
    """Sentences for beside the numbers of a model: what is not quantised, what has no adapter."""
    whole, bare = kept_whole(model), getattr(model, "without_adapters", ())
    found = []
    if whole:
        found.append(f"bitsandbytes leaves {', '.join(whole)} as they are, not quantised")
    if bare:
        found.append(f"all-linear without {', '.join(bare)}, which peft cannot adapt")
    return tuple(found)


def unadaptable(model: nn.Module) -> tuple[str, ...]:
    """Last names of linear layers that peft takes for all-linear, and then fails with; sorted.

    Output projections of Mamba layers, which peft refuses (their kernels read the weight itself),
    and classes of linear layers that return more than a product: routers, mostly.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    found = set()
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        refused = kind in _MAMBA and last == "out_proj"
        if isinstance(module, nn.Linear) and (refused or not _is_product(module)):
            found.add(last)
    return tuple(sorted(found))


def adaptable_names(model_config: Any) -> tuple[str, ...]:
    """The linear layers that peft can adapt, by their last names, where all-linear has others.

    Empty where all-linear is what peft itself takes. Raises what transformers raises for a model
    that it cannot build.
    """
    with torch.device("meta"):
        model = trained_class(model_config, images=False, num_labels=0).from_config(
            copy.deepcopy(model_config)
        )
    bare = unadaptable(model)
    if not bare:
        return ()
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return tuple(sorted(linear - set(bare)))


_MAMBA = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"})
"""The types of `_check_lora_target_modules_mamba` of peft 0.21."""


def _is_product(module: nn.Linear) -> bool:
    """Whether a layer computes what its class says, and no subclass of it something else."""
    kind = type(module)
    if kind.forward is nn.Linear.forward or not kind.__module__.startswith("transformers."):
        return True
    weight = module.weight
    with torch.no_grad():
        result = module(
            torch.empty(1, module.in_features, dtype=weight.dtype, device=weight.device)
        )
    return isinstance(result, torch.Tensor)
