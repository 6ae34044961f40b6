"""Encoders from their architecture configuration, and what is done with their output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tuner.core.errors import InputError
from tuner.predict.training.base import Environment


def build_encoder(model_config: Any, attention: str) -> Any:
    """An encoder without a task head, in fp32, on the device of the context.

    Raises `InputError` for what transformers cannot build.
    """
    from transformers import AutoModel

    try:
        return AutoModel.from_config(
            model_config, dtype=torch.float32, attn_implementation=attention
        )
    except (ValueError, ImportError) as error:
        text = " ".join(str(error).split())
        raise InputError(
            f"transformers cannot build this encoder with attention {attention}: {text[:300]}"
        ) from error


def initialiser(encoders: Sequence[Any]) -> Callable[[nn.Module], None]:
    """Initialises a module without weights: of an encoder as transformers does, else as PyTorch."""
    inside = {id(module) for encoder in encoders for module in encoder.modules()}

    def initialise(module: nn.Module) -> None:
        if id(module) in inside:
            encoders[0]._init_weights(module)
        elif isinstance(module, nn.Linear):
            module.reset_parameters()

    return initialise


def initialise_positions(encoder: nn.Module) -> None:
    """Token types of all tokens are 0, as transformers leaves them."""
    for name, buffer in encoder.named_buffers():
        if name.endswith("token_type_ids"):
            buffer.zero_()


def enable_checkpointing(
    encoder: Any, environment: Environment, autocast_dtype: torch.dtype | None
) -> None:
    """Recompute each layer in the backward pass."""
    options: dict[str, Any] = {"use_reentrant": False}
    if environment.device == "meta":
        # On a machine PyTorch restores autocast by itself.
        options["context_fn"] = partial(environment.checkpoint_contexts, autocast_dtype)
    encoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    encoder.enable_input_require_grads()


def lora_config(
    targets: tuple[str, ...], *, rank: int, alpha: float, dropout: float, skip_pooler: bool = False
) -> Any:
    """Adapters of peft; `targets` are module names, or ("all-linear",)."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
        exclude_modules=r".*pooler.*" if skip_pooler else None,
        bias="none",
    )


def add_adapter(encoder: Any, config: Any, environment: Environment, name: str) -> Any:
    """`encoder` with a set of adapters of that name; the first one wraps it.

    Raises `InputError` when the targets do not exist in the model.
    """
    from peft import PeftModel, get_peft_model

    is_meta = environment.device == "meta"
    try:
        with torch.device(environment.device):
            if isinstance(encoder, PeftModel):
                encoder.add_adapter(name, config, low_cpu_mem_usage=is_meta)
                return encoder
            return get_peft_model(encoder, config, adapter_name=name, low_cpu_mem_usage=is_meta)
    except ValueError as error:
        # The second is what peft says where some modules are excluded.
        known = ("not found in the base model", "No modules were targeted for adaptation")
        if not any(text in str(error) for text in known):
            raise
        targets = ", ".join(config.target_modules)
        raise InputError(
            f"lora_targets {targets} do not exist in the model",
            hint="all-linear takes every linear layer",
        ) from error


def attention_mask(tokens: torch.Tensor, *, padded: bool) -> torch.Tensor:
    """A mask of the shape of `tokens`: all but the last token, or all.

    What is masked does not matter for memory or time, only whether anything is: attention then
    gets a mask, which rules its fastest kernels out.
    """
    mask = torch.ones_like(tokens)
    if padded:
        mask[:, -1] = 0
    return mask


def mean_pooled(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over unmasked tokens in fp32: (samples, length, width) to (samples, width).

    Weights are expanded to the size of `hidden`, as in the recipe on the model cards of
    sentence-transformers: autograd keeps them.
    """
    weights = mask.unsqueeze(-1).expand(hidden.shape).float()
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
