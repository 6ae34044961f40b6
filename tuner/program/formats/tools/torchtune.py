"""What a configuration of torchtune's recipes is to be changed to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.core.setup.optimizers import OPTIMIZERS
from tuner.program.formats.arguments import (
    Settings,
    without_none,
)
from tuner.program.formats.format import Format
from tuner.program.formats.settings_reader import SettingsReader

_TORCHTUNE_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj"} | {
    "o_proj": "output_proj"
}


_MLP = ("gate_proj", "up_proj", "down_proj")


_TORCHTUNE_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def torchtune(chosen: SettingsReader, model: str | None) -> Settings:
    """What a configuration of torchtune's recipes (0.6.1) is to be changed to."""
    del model  # torchtune names a builder, which does not follow from the name of the model
    precision = chosen.text("precision")
    chosen.get("effective_batch")  # the product of micro-batch and accumulation
    optimizer = OPTIMIZERS[chosen.text("optimizer")]
    dtype = _TORCHTUNE_DTYPES.get(chosen.dtype)
    if precision == "int8" or dtype is None:
        chosen.leave("precision", "the recipes train in fp32 and bf16, quantised to nf4 at most")
    chosen.leave("mixed_precision", "the recipes train in one dtype, without autocast")
    chosen.implies("attention", "sdpa")
    norm = chosen.get("max_grad_norm")
    return without_none(
        {
            "model": _adapters(chosen) if chosen.has_adapters else None,
            "tokenizer": without_none({"max_seq_len": chosen.get("max_length")}),
            "batch_size": chosen.get("micro_batch"),
            "gradient_accumulation_steps": chosen.get("grad_accum"),
            "optimizer": {
                "_component_": optimizer.path.replace(":", "."),
                **optimizer.recipe,
            },
            "clip_grad_norm": norm or None,
            "dtype": dtype,
            "enable_activation_checkpointing": chosen.get("gradient_checkpointing"),
        }
    )


def _adapters(chosen: SettingsReader) -> Settings:
    if chosen.text("adapter") == "rslora":
        chosen.leave("adapter", "the recipes scale by lora_alpha / lora_rank: adjust lora_alpha")
    return without_none(
        {
            **_torchtune_targets(chosen),
            "use_dora": True if chosen.text("adapter") == "dora" else None,
            "lora_rank": chosen.get("lora_rank"),
            "lora_alpha": chosen.get("lora_alpha"),
            "lora_dropout": chosen.get("lora_dropout"),
            "quantize_base": chosen.text("precision") == "nf4",
        }
    )


def _recipe(settings: Mapping[str, Any]) -> str:
    recipe = "lora_finetune_single_device" if "model" in settings else "full_finetune_single_device"
    return f"changes to the configuration of tune run {recipe}"


def _torchtune_targets(chosen: SettingsReader) -> Settings:
    targets = chosen.targets
    names = [*_TORCHTUNE_ATTENTION, *_MLP] if targets == "all-linear" else list(targets or [])
    in_mlp = [name for name in _MLP if name in names]
    unknown = [name for name in names if name not in _TORCHTUNE_ATTENTION and name not in _MLP]
    if unknown or (in_mlp and len(in_mlp) < len(_MLP)):
        chosen.leave("lora_targets", "the MLP gets adapters as a whole, other modules get none")
    return {
        "lora_attn_modules": [_TORCHTUNE_ATTENTION[n] for n in names if n in _TORCHTUNE_ATTENTION],
        "apply_lora_to_mlp": len(in_mlp) == len(_MLP),
        "apply_lora_to_output": False,
    }


FORMAT = Format(
    torchtune,
    suffix=".yaml",
    use=_recipe,
    workloads=("causal_lm",),
)
