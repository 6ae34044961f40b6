"""The file of `llamafactory-cli train`."""

from __future__ import annotations

from tuner.program.formats.arguments import (
    DTYPE_OF_MIXED,
    Settings,
    machine_arguments,
    own_preparation,
    trainer_arguments,
    without_none,
)
from tuner.program.formats.format import Format
from tuner.program.formats.settings_reader import SettingsReader

_FLASH_ATTN = {"eager": "disabled", "sdpa": "sdpa", "flash_attention_2": "fa2"}


def llamafactory(chosen: SettingsReader, model: str | None) -> Settings:
    """The file of `llamafactory-cli train` (0.9.5), less data set, template and schedule."""
    precision = chosen.text("precision")
    arguments = trainer_arguments(chosen)
    arguments.pop("gradient_checkpointing_kwargs", None)
    checkpointing = arguments.pop("gradient_checkpointing", None)
    own_preparation(chosen)
    double = chosen.get("double_quant")
    chosen.implies("padding", "none")
    # It loads in the dtype of the mixed precision, and in no other; where it trains all weights it
    # can widen them.
    said = not chosen.has_adapters and chosen.dtype in ("float32", "bfloat16")
    if not said and DTYPE_OF_MIXED.get(chosen.text("mixed_precision")) != chosen.dtype:
        which = "compute_dtype" if chosen.is_quantized else "precision"
        chosen.leave(which, "the tool keeps weights in the dtype of bf16 or fp16")
    return without_none(
        {
            "model_name_or_path": model,
            "stage": "sft",
            "do_train": True,
            **_adapters(chosen),
            "quantization_method": "bnb" if chosen.is_quantized else None,
            "quantization_bit": {"nf4": 4, "int8": 8}.get(precision),
            "quantization_type": "nf4" if precision == "nf4" else None,
            "double_quantization": double if precision == "nf4" else None,
            "cutoff_len": chosen.get("max_length"),
            "flash_attn": _FLASH_ATTN.get(chosen.text("attention")),
            "disable_gradient_checkpointing": not checkpointing,
            "use_reentrant_gc": bool(chosen.get("use_reentrant")) if checkpointing else None,
            **arguments,
            **machine_arguments(chosen),
        }
    )


def _adapters(chosen: SettingsReader) -> Settings:
    if not chosen.has_adapters:
        # Otherwise what is trained is widened to fp32.
        return {"finetuning_type": "full", "pure_bf16": chosen.dtype == "bfloat16"}
    targets, saved = chosen.targets, chosen.saved_modules
    return {
        "finetuning_type": "lora",
        **chosen.kind_of_adapter(),
        "lora_rank": chosen.get("lora_rank"),
        "lora_alpha": chosen.get("lora_alpha"),
        "lora_dropout": chosen.get("lora_dropout"),
        "lora_target": "all" if isinstance(targets, str) else ",".join(targets or []),
        "additional_target": ",".join(saved) if saved else None,
    }


FORMAT = Format(
    llamafactory,
    suffix=".yaml",
    use="llamafactory-cli train FILE, with data set, template and schedule added",
    workloads=("causal_lm",),
)
