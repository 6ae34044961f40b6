"""bitsandbytes layers without a checkpoint: the tensors that quantised loading would leave.

transformers quantises while it reads a checkpoint. Here the layers are given tensors of
the same shapes and types directly, so that a model needs neither weights nor a GPU.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from tuner.space.models.trainable import trained_class

NF4_BLOCKSIZE = 64
"""Weights that share one scale (bitsandbytes default, QLoRA paper section 3)."""
QUANTIZED = ("Linear4bit", "Linear8bitLt")
"""Names of bitsandbytes' layers; importing their classes takes seconds."""
NESTED_BLOCKSIZE = 256
"""Scales that share one second-level scale under double quantisation (same source)."""


def quantize_linears(
    model: Any,
    *,
    precision: str,
    dtype: torch.dtype,
    double_quant: bool = True,
    skipped: tuple[str, ...] | None = None,
    storage: torch.dtype | None = None,
) -> None:
    """Replace the linear layers that transformers would quantise.

    Those are all of class `nn.Linear` and GPT-2's Conv1D, but for the output head, whatever its
    name, and what the class keeps in fp32; a checkpoint may name others (`skipped`). Classes of
    their own (Falcon's) and experts in one tensor stay as they are.

    `precision` is "nf4" (scales in 8 bits with `double_quant`, else in fp32) or "int8"
    (LLM.int8() with its default outlier threshold). `storage` is the dtype that 4-bit codes are
    packed into, by default uint8; FSDP2 shards floating ones only. The model keeps its device; the
    new layers hold uninitialised tensors there.
    """
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    config = quantization_config(precision, dtype, double_quant=double_quant, storage=storage)
    replace_with_bnb_linear(
        model,
        modules_to_not_convert=HfQuantizer.get_modules_to_not_convert(
            model, None if skipped is None else list(skipped), model._keep_in_fp32_modules
        ),
        quantization_config=config,
    )
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            _fill_nf4(module, dtype, storage or torch.uint8, double_quant=double_quant)
        elif type(module).__name__ == "Linear8bitLt":
            _fill_int8(module)
    flagged: Any = model
    flagged.is_loaded_in_4bit = precision == "nf4"
    flagged.is_loaded_in_8bit = precision == "int8"
    flagged.is_quantized = True
    flagged.config.quantization_config = config
    flagged.config._is_quantized = True


def quantization_config(
    precision: str,
    dtype: torch.dtype,
    *,
    double_quant: bool = True,
    storage: torch.dtype | None = None,
) -> Any:
    """The quantisation that transformers is asked for: `precision` is "nf4" or "int8"."""
    from transformers import BitsAndBytesConfig

    if precision == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=double_quant,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=storage,
        )
    return BitsAndBytesConfig(load_in_8bit=True)


def quantized_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The tensors of quantised layers that are neither parameters nor buffers (scales)."""
    tensors: list[torch.Tensor] = []
    for state in _states(model).values():
        tensors += [state.absmax, state.code]
        if state.nested:
            tensors += [state.offset, state.state2.absmax, state.state2.code]
    for parameter in model.parameters():
        scales = getattr(parameter, "SCB", None)
        if scales is not None:
            tensors.append(scales)
    return tensors


def kept_whole(model: Any) -> tuple[str, ...]:
    """Classes of frozen modules with matrices that quantisation left as they are, sorted.

    Empty where nothing is quantised. Embeddings and the output head are never quantised, and are
    not among them.
    """
    if not getattr(model, "is_quantized", False):
        return ()
    modules = list(model.modules())
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    heads = [] if head is None else list(head.modules())
    found = {
        type(module).__name__
        for module in modules
        if not isinstance(module, nn.Embedding) and module not in heads
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1
        and not parameter.requires_grad
        and type(module).__name__ not in QUANTIZED
        and parameter.numel() > _SMALL
    }
    return tuple(sorted(found))


_SMALL = 1 << 20
"""Smaller modules are not mentioned when they stay unquantised: routers, convolutions."""


def _states(model: nn.Module) -> dict[torch.Tensor, Any]:
    """The state to read packed 4-bit weights with, which layers have and shards lack."""
    of_layers = {
        module._parameters["weight"]: module.__dict__["quant_state"]
        for module in model.modules()
        if "quant_state" in module.__dict__
    }
    return {p: of_layers[p] for p in model.parameters() if p in of_layers}


def total_numel(model: nn.Module) -> int:
    """Number of weights of a model, sharded or not; see `logical_numel`."""
    states = _states(model)
    return sum(
        math.prod(states[p].shape) if p in states else whole_numel(p) for p in model.parameters()
    )


def whole_numel(parameter: torch.Tensor) -> int:
    """Number of elements of a parameter; DeepSpeed leaves none in one that ranks share."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def logical_numel(parameter: torch.Tensor) -> int:
    """Number of weights that a parameter stands for; packed 4-bit storage holds two a byte."""
    state = getattr(parameter, "quant_state", None)
    return math.prod(state.shape) if state is not None else whole_numel(parameter)


def _fill_nf4(linear: Any, dtype: torch.dtype, storage: torch.dtype, *, double_quant: bool) -> None:
    from bitsandbytes.nn import Params4bit

    state = _nf4_state(linear.weight, dtype, double_quant=double_quant)
    shape, device = linear.weight.shape, linear.weight.device
    linear.weight = Params4bit(
        torch.empty(
            math.ceil(math.prod(shape) / 2 / storage.itemsize), 1, dtype=storage, device=device
        ),
        requires_grad=False,
        quant_state=state,
        blocksize=NF4_BLOCKSIZE,
        compress_statistics=double_quant,
        quant_type="nf4",
        quant_storage=storage,
        module=linear,
        bnb_quantized=True,
    )
    linear.quant_state = state


def _nf4_state(weight: torch.Tensor, dtype: torch.dtype, *, double_quant: bool) -> Any:
    from bitsandbytes.functional import QuantState

    shape, device = weight.shape, weight.device
    blocks = math.ceil(math.prod(shape) / NF4_BLOCKSIZE)
    nested: dict[str, Any] = {}
    if double_quant:
        second = QuantState(
            absmax=torch.empty(math.ceil(blocks / NESTED_BLOCKSIZE), device=device),
            code=torch.empty(256, device=device),
            blocksize=NESTED_BLOCKSIZE,
            dtype=torch.float32,
        )
        nested = {"offset": torch.empty((), device=device), "state2": second}
    return QuantState(
        absmax=torch.empty(
            blocks, dtype=torch.uint8 if double_quant else torch.float32, device=device
        ),
        shape=shape,
        code=torch.empty(16, device=device),
        blocksize=NF4_BLOCKSIZE,
        quant_type="nf4",
        dtype=dtype,
        **nested,
    )


def _fill_int8(linear: Any) -> None:
    from bitsandbytes.nn import Int8Params

    shape, device = linear.weight.shape, linear.weight.device
    codes = torch.empty(shape, dtype=torch.int8, device=device)
    scales = torch.empty(shape[0], dtype=torch.float32, device=device)
    linear.weight = Int8Params(
        codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales
    )


def remarks(model: Any) -> tuple[str, ...]:
    """Sentences for beside the numbers: what is not quantised, without adapter, to be named."""
    whole, bare = kept_whole(model), getattr(model, "without_adapters", ())
    found = []
    if whole:
        found.append(f"bitsandbytes leaves {', '.join(whole)} as they are, not quantised")
    if bare:
        found.append(f"all-linear without {', '.join(bare)}, which peft cannot adapt")
    if layers := getattr(model, "named_layers", ()):
        found.append(f"accelerate needs fsdp_transformer_layer_cls_to_wrap={','.join(layers)}")
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
    """True if a layer computes a plain product, not a subclass's own function."""
    kind = type(module)
    if kind.forward is nn.Linear.forward or not kind.__module__.startswith("transformers."):
        return True
    weight = module.weight
    with torch.no_grad():
        result = module(
            torch.empty(1, module.in_features, dtype=weight.dtype, device=weight.device)
        )
    return isinstance(result, torch.Tensor)
