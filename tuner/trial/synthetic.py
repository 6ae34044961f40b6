"""Synthetic weights: a model built on the meta device gets its tensors on a real one.

Speed and memory do not depend on the values of the weights, as long as they stay finite and small
enough for LLM.int8() to see no outliers. So nothing has to be downloaded. Every tensor is
allocated on the device once, at its final size, and filled in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

_UNIFORM_STD = 1 / math.sqrt(3)
"""Standard deviation of a uniform value in [-1, 1]."""

_OUTPUT_STD = 0.5
"""Standard deviation of a quantised layer's output for inputs of 1: the gated products of an MLP
then stay below 6, the threshold above which LLM.int8() treats a column as an outlier."""

_FIRST_SCALE, _SCALE_RANGE = 1.0, 0.2
"""Double quantisation keeps the scale of a block as offset + code: here 1 plus or minus 20 %."""


def fill(model: nn.Module, device: str, *, on_host: Sequence[nn.Module] = ()) -> None:
    """Give every tensor of `model` (on the meta device) storage and values on `device`.

    Layers of transformers are initialised as their authors do, quantised ones hold random codes.
    Tied parameters stay tied. Modules in `on_host` are filled on the device one after the other,
    where that takes no time, and moved to host memory. Of a sharded model only this rank's shards
    are filled. Raises torch.OutOfMemoryError where the
    device is too small.
    """
    if any(hasattr(parameter, "_local_tensor") for parameter in model.parameters()):
        _fill_shards(model, device)
        return
    for part in on_host:
        _fill_modules(model, list(part.modules()), device)
        part.to("cpu")
    done = {id(module) for part in on_host for module in part.modules()}
    _fill_modules(model, [m for m in model.modules() if id(m) not in done], device)


def _fill_shards(model: Any, device: str) -> None:
    """Give this rank's shards small random values; what no rank shares is as the model has it."""
    model.to_empty(device=device)
    packed = set()
    for module in model.modules():
        if "quant_state" in module.__dict__:
            _fill_scales(module.quant_state, device)
            packed.add(module.weight)
    with torch.no_grad():
        for parameter in model.parameters():
            own = getattr(parameter, "_local_tensor", parameter)
            if parameter in packed:
                own.view(torch.uint8).random_(0, 256)
            else:
                _small_random(own)
        for module in model.modules():
            if any(True for _ in module.buffers(recurse=False)):
                _initialise(model, module, set())


def _fill_modules(model: nn.Module, modules: Sequence[nn.Module], device: str) -> None:
    moved: dict[int, Any] = {}
    for module in modules:
        _move(module._parameters, moved, device)
        _move(module._buffers, moved, device)
        if type(module).__name__ == "Linear4bit":
            module.quant_state = module.weight.quant_state  # type: ignore[union-attr]
    seen: set[int] = set()
    with torch.no_grad():
        for module in modules:
            _initialise(model, module, seen)


def _move(tensors: dict[str, Any], moved: dict[int, Any], device: str) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if id(tensor) not in moved:
            # The old tensor is kept beside the new one, so that its id is not used again.
            moved[id(tensor)] = (tensor, _on_device(tensor, device))
        tensors[name] = moved[id(tensor)][1]


def _on_device(tensor: torch.Tensor, device: str) -> Any:
    if not tensor.is_meta:
        return tensor.to(device)
    data = torch.empty_like(tensor.data, device=device)
    kind = type(tensor).__name__
    if kind == "Params4bit":
        return _four_bit(tensor, data, device)
    if kind == "Int8Params":
        return _eight_bit(tensor, data, device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data


def _four_bit(old: Any, codes: torch.Tensor, device: str) -> Any:
    """Random 4-bit codes with scales such that the layer's output has `_OUTPUT_STD`."""
    state = old.quant_state
    codes.random_(0, 256)
    _fill_scales(state, device)
    return type(old)(
        codes,
        requires_grad=False,
        quant_state=state,
        blocksize=old.blocksize,
        compress_statistics=old.compress_statistics,
        quant_type=old.quant_type,
        quant_storage=old.quant_storage,
        module=old.module,
        bnb_quantized=True,
    )


def _fill_scales(state: Any, device: str) -> None:
    """Fill in the code table and scales of a 4-bit layer that was on the meta device."""
    from bitsandbytes.functional import get_4bit_type

    scale = _OUTPUT_STD / math.sqrt(state.shape[-1]) / _UNIFORM_STD
    state.code = get_4bit_type(state.quant_type, device=device)
    state.absmax = torch.empty_like(state.absmax, device=device)
    if state.nested:
        state.absmax.random_(0, 256)
        state.offset = torch.full_like(state.offset, _FIRST_SCALE * scale, device=device)
        second = state.state2
        second.absmax = torch.full_like(second.absmax, _SCALE_RANGE * scale, device=device)
        second.code = torch.linspace(-1, 1, 256, device=device)
    else:
        state.absmax.fill_(scale)


def _eight_bit(old: Any, codes: torch.Tensor, device: str) -> Any:
    codes.random_(-127, 128)
    scale = _OUTPUT_STD / math.sqrt(codes.shape[-1]) / _UNIFORM_STD
    scales = torch.full_like(old.SCB, scale, device=device)
    return type(old)(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)


def _initialise(model: Any, module: nn.Module, seen: set[int]) -> None:
    """Fill the tensors that `module` itself holds and that no other module has filled."""
    own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    floats = [t for t in own if t.is_floating_point() and id(t) not in seen]
    seen.update(map(id, own))
    for tensor in own:
        if not tensor.is_floating_point() and not _is_quantised(tensor):
            _count_up(tensor)
    if not own or (not floats and any(map(torch.is_floating_point, own))):
        return  # it has nothing, or is tied to a module that was filled
    for tensor in floats:
        # Tensors that the model's own initialisation skips must not stay uninitialised.
        _small_random(tensor)
    initialise: Callable[[nn.Module], Any] | None = getattr(model, "_init_weights", None)
    if initialise is not None and not any(map(_is_quantised, own)):
        initialise(module)


def _is_quantised(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ in ("Params4bit", "Int8Params")


def _count_up(tensor: torch.Tensor) -> None:
    """Positions 0, 1, 2, ... along the last dimension: what most integer buffers hold."""
    if tensor.dim() == 0 or tensor.dtype is torch.bool:
        tensor.fill_(1)
        return
    row = torch.arange(tensor.shape[-1], device=tensor.device, dtype=tensor.dtype)
    tensor.copy_(row.expand_as(tensor))


def _small_random(tensor: torch.Tensor) -> None:
    tensor.uniform_(-0.02, 0.02)
