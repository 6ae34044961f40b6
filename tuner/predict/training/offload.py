"""Frozen layers whose weights stay in host memory and travel to the device for each use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from tuner.core.errors import InputError


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks of a language model, first to last, without those of a vision tower beside it.

    Raises `InputError` for a model without.
    """
    find: Any = getattr(model, "get_decoder", None)
    decoder: nn.Module = find() if find is not None else model
    lists = [list(module) for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise InputError("offload needs a model made of layers, and this model has no list of them")
    return max(lists, key=len)


def keep_on_host(layers: Iterable[nn.Module], device: str) -> None:
    """Let the frozen weights of `layers` (on the host) be copied to `device` for each use.

    accelerate's hooks do the copying, as they do for what a `device_map` of `from_pretrained`
    puts on the processor. Trainable weights, the adapters, move to the device for good.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for layer in layers:
        for module in list(layer.modules()):
            own = list(module.parameters(recurse=False))
            if any(parameter.requires_grad for parameter in own):
                module.to(device)
            elif own:
                add_hook_to_module(module, AlignDevicesHook(device, offload=True))


def move_all_but(model: nn.Module, kept: Iterable[nn.Module], device: str) -> None:
    """Move the tensors of all modules of `model` to `device`, except those of `kept`."""
    stays = {id(module) for layer in kept for module in layer.modules()}
    for module in model.modules():
        if id(module) in stays:
            continue
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
