"""The file of `axolotl train`."""

from __future__ import annotations

from tuner.program.formats.arguments import (
    Settings,
    own_preparation,
    trainer_arguments,
    without_none,
)
from tuner.program.formats.format import Format
from tuner.program.formats.settings_reader import SettingsReader


def axolotl(chosen: SettingsReader, model: str | None) -> Settings:
    """An Axolotl configuration (0.19), less data sets and schedule."""
    precision = chosen.text("precision")
    arguments = trainer_arguments(chosen)
    own_preparation(chosen)
    double = chosen.get("double_quant")
    workers, prefetch = chosen.get("num_workers"), chosen.get("prefetch_factor")
    explicit = {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": chosen.dtype,
    }
    return without_none(
        {
            "base_model": model,
            **_adapters(chosen, precision),
            "load_in_4bit": precision == "nf4",
            "load_in_8bit": precision == "int8",
            "bnb_config_kwargs": explicit if precision == "nf4" else None,
            "sequence_len": chosen.get("max_length"),
            "sample_packing": False,
            "pad_to_sequence_len": True if chosen.text("padding") == "max_length" else None,
            "micro_batch_size": chosen.get("micro_batch"),
            "gradient_accumulation_steps": chosen.get("grad_accum"),
            "optimizer": chosen.get("optimizer"),
            "gradient_checkpointing": arguments.get("gradient_checkpointing"),
            "gradient_checkpointing_kwargs": arguments.get("gradient_checkpointing_kwargs"),
            "bf16": arguments["bf16"],
            "fp16": arguments["fp16"],
            "tf32": precision == "tf32",
            "attn_implementation": chosen.get("attention"),
            "max_grad_norm": chosen.get("max_grad_norm"),
            "deepspeed": arguments.get("deepspeed"),
            "torch_compile": chosen.get("torch_compile"),
            "dataloader_num_workers": workers,
            "dataloader_pin_memory": chosen.get("pin_memory"),
            "dataloader_prefetch_factor": prefetch if workers else None,
        }
    )


def _adapters(chosen: SettingsReader, precision: str) -> Settings:
    if not chosen.has_adapters:
        if chosen.dtype != "float32":
            chosen.leave("precision", "the tool widens embeddings and norms to fp32 to train them")
        return {}
    targets = chosen.targets
    return {
        "adapter": "qlora" if precision == "nf4" else "lora",
        **chosen.kind_of_adapter("peft_"),
        "lora_r": chosen.get("lora_rank"),
        "lora_alpha": chosen.get("lora_alpha"),
        "lora_dropout": chosen.get("lora_dropout"),
        "lora_target_linear": True if isinstance(targets, str) else None,
        "lora_target_modules": targets if isinstance(targets, list) else None,
        "lora_modules_to_save": chosen.saved_modules,
    }


FORMAT = Format(
    axolotl,
    suffix=".yaml",
    use="axolotl train FILE, with data sets and schedule added",
    workloads=("causal_lm",),
)
