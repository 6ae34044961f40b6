"""The file of `trl sft --config`."""

from __future__ import annotations

from tuner.program.formats.arguments import (
    Settings,
    machine_arguments,
    trainer_arguments,
    without_none,
)
from tuner.program.formats.format import Format
from tuner.program.formats.settings_reader import SettingsReader


def trl(chosen: SettingsReader, model: str | None) -> Settings:
    """The file of `trl sft --config`: fields of SFTConfig and ModelConfig (TRL 1.16)."""
    precision = chosen.text("precision")
    double = chosen.get("double_quant")
    chosen.implies("padding", "none")
    chosen.implies(
        "loss",
        "chunked",
        "its nll loss (TRL 1.16) never has the whole logits: it takes less than was priced",
    )
    if chosen.is_quantized:
        why = "SFTTrainer keeps the adapters of a quantised model in bf16"
        chosen.implies("adapter_dtype", "bf16", why, default="fp32")
    else:
        chosen.implies("adapter_dtype", "fp32", "the adapters stay as peft makes them")
    settings = {
        "model_name_or_path": model,
        "dtype": chosen.dtype,
        "attn_implementation": chosen.get("attention"),
        **trainer_arguments(chosen, loss=None),
        "loss_type": "nll",
        **machine_arguments(chosen),
        "max_length": chosen.get("max_length"),
        **_adapters(chosen),
        "load_in_4bit": True if precision == "nf4" else None,
        "bnb_4bit_quant_type": "nf4" if precision == "nf4" else None,
        "use_bnb_nested_quant": double if precision == "nf4" else None,
        "load_in_8bit": True if precision == "int8" else None,
    }
    if chosen.is_quantized:
        why = "SFTTrainer (TRL 1.16) prepares nothing: all stays in the dtype of loading"
        chosen.implies("kbit_preparation", "none", why)
    else:
        chosen.get("kbit_preparation")
    return without_none(settings)


def _adapters(chosen: SettingsReader) -> Settings:
    if not chosen.has_adapters:
        return {"use_peft": False}
    targets = chosen.targets
    return {
        "use_peft": True,
        **chosen.kind_of_adapter(),
        "lora_r": chosen.get("lora_rank"),
        "lora_alpha": chosen.get("lora_alpha"),
        "lora_dropout": chosen.get("lora_dropout"),
        "lora_target_modules": [targets] if isinstance(targets, str) else targets,
        "lora_modules_to_save": chosen.saved_modules,
    }


FORMAT = Format(
    trl,
    suffix=".yaml",
    use="trl sft --config FILE, with data set and schedule added",
    workloads=("causal_lm",),
)
