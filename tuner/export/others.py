"""Formats of tools that do not train with transformers' Trainer, or not alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from tuner.export.huggingface import Settings, without_none
from tuner.export.settings_reader import SettingsReader
from tuner.expressions import show
from tuner.records import KnobValue
from tuner.space.optimizers import OPTIMIZERS

_TORCHTUNE_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj"} | {
    "o_proj": "output_proj"
}
_MLP = ("gate_proj", "up_proj", "down_proj")
_TORCHTUNE_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def torchtune(chosen: SettingsReader, model: str | None) -> Settings:
    """What a configuration of torchtune's LoRA recipes (0.6.1) is to be changed to."""
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
            "model": without_none(
                {
                    **_torchtune_targets(chosen),
                    "lora_rank": chosen.get("lora_rank"),
                    "lora_alpha": chosen.get("lora_alpha"),
                    "lora_dropout": chosen.get("lora_dropout"),
                    "quantize_base": precision == "nf4",
                }
            ),
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


def lightning(chosen: SettingsReader, model: str | None) -> Settings:
    """The part `trainer` of a LightningCLI file: arguments of `lightning.Trainer` (2.6)."""
    del model  # the model is the user's own module
    mixed, precision = chosen.text("mixed_precision"), chosen.text("precision")
    known = {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(mixed)
    plain = {"bf16": "bf16-true", "fp16": "16-true", "fp32": "32-true", "tf32": "32-true"}
    if precision not in ("fp32",):
        chosen.leave("precision", "how base weights are kept is up to your LightningModule")
    for name in ("micro_batch", "max_length"):
        chosen.leave(name, "belongs to your data module")
    norm = chosen.get("max_grad_norm")
    return {
        "trainer": without_none(
            {
                "accumulate_grad_batches": chosen.get("grad_accum"),
                "precision": known or plain.get(precision),
                "gradient_clip_val": norm or None,
            }
        )
    }


def accelerate(chosen: SettingsReader, model: str | None) -> Settings:
    """A file of `accelerate launch --config_file` for one process on one GPU (accelerate 1.15)."""
    del model  # named by the script that is launched
    chosen.leave("grad_accum", "belongs to Accelerator(gradient_accumulation_steps=...)")
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": chosen.text("mixed_precision") or "no",
        "num_machines": 1,
        "num_processes": 1,
        "machine_rank": 0,
        "use_cpu": False,
        "debug": False,
    }


def deepspeed(chosen: SettingsReader, model: str | None) -> Settings:
    """A DeepSpeed configuration (0.19) for one GPU without ZeRO."""
    del model  # named by the script that is launched
    mixed = chosen.text("mixed_precision")
    return without_none(
        {
            "train_batch_size": chosen.get("effective_batch"),
            "train_micro_batch_size_per_gpu": chosen.get("micro_batch"),
            "gradient_accumulation_steps": chosen.get("grad_accum"),
            "gradient_clipping": chosen.get("max_grad_norm"),
            "bf16": {"enabled": mixed == "bf16"},
            "fp16": {"enabled": mixed == "fp16"},
            "zero_optimization": {"stage": 0},
        }
    )


def command_line(flags: Mapping[str, KnobValue]) -> str:
    """`--name value` for each flag, quoted for a shell; a list as several words."""
    words: list[str] = []
    for name, value in flags.items():
        words.append(f"--{name}")
        words += list(value) if isinstance(value, tuple) else [show(value)]
    return shlex.join(words)
