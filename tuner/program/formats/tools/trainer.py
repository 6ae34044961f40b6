"""Keyword arguments for a script around transformers' Trainer, peft and bitsandbytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.program.formats.arguments import (
    Settings,
    machine_arguments,
    trainer_arguments,
    without_none,
)
from tuner.program.formats.format import Format
from tuner.program.formats.settings_reader import SettingsReader


def trainer(chosen: SettingsReader, model: str | None) -> Settings:
    """Dictionaries for a script around transformers' Trainer, peft and bitsandbytes."""
    training = trainer_arguments(chosen) | machine_arguments(chosen)
    if chosen.is_quantized and chosen.text("kbit_preparation") == "trl":
        chosen.leave("kbit_preparation", "widen the norms to fp32 as TRL's SFTTrainer does")
    else:
        chosen.get("kbit_preparation")
    settings: Settings = {
        "MODEL": without_none(
            {
                "pretrained_model_name_or_path": model,
                "dtype": chosen.dtype,
                "attn_implementation": chosen.get("attention"),
            }
        ),
        "QUANTIZATION": _quantization(chosen),
        "PREPARATION": _preparation(chosen, training),
        "LORA": _lora(chosen),
        "TOKENIZER": without_none(
            {
                "truncation": True,
                "max_length": chosen.get("max_length"),
                "padding": "max_length" if chosen.text("padding") == "max_length" else None,
            }
        ),
        "TRAINING": training,
    }
    return {name: part for name, part in settings.items() if part}


def _lora(chosen: SettingsReader) -> Settings:
    """Keyword arguments of `peft.LoraConfig`; empty in full fine-tuning."""
    if not chosen.has_adapters:
        return {}
    return without_none(
        {
            "r": chosen.get("lora_rank"),
            **chosen.kind_of_adapter(),
            "lora_alpha": chosen.get("lora_alpha"),
            "lora_dropout": chosen.get("lora_dropout"),
            "target_modules": chosen.targets,
            "modules_to_save": chosen.saved_modules,
            "task_type": "CAUSAL_LM",
        }
    )


def _quantization(chosen: SettingsReader) -> Settings:
    """Keyword arguments of `transformers.BitsAndBytesConfig`; empty without quantisation."""
    double = chosen.get("double_quant")
    if chosen.text("precision") == "int8":
        return {"load_in_8bit": True}
    if chosen.text("precision") != "nf4":
        return {}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": chosen.dtype,
    }


def _preparation(chosen: SettingsReader, training: Settings) -> Settings:
    """Keyword arguments of `peft.prepare_model_for_kbit_training`; empty where it is not called.

    Without them it turns checkpointing on, and reentrant checkpoints, whatever the trainer is told.
    """
    if not chosen.is_quantized or chosen.text("kbit_preparation") != "peft":
        return {}
    checkpointing = bool(training.get("gradient_checkpointing"))
    return without_none(
        {
            "use_gradient_checkpointing": checkpointing,
            "gradient_checkpointing_kwargs": training.get("gradient_checkpointing_kwargs"),
        }
    )


def _use(settings: Mapping[str, Any]) -> str:
    """The calls that take the dictionaries which are there."""
    quantization = ", quantization_config=BitsAndBytesConfig(**QUANTIZATION)"
    calls = {
        "MODEL": f"from_pretrained(**MODEL{quantization if 'QUANTIZATION' in settings else ''})",
        "PREPARATION": "prepare_model_for_kbit_training(model, **PREPARATION)",
        "LORA": "get_peft_model(model, LoraConfig(**LORA))",
        "TOKENIZER": "tokenizer(texts, **TOKENIZER)",
        "TRAINING": "TrainingArguments(**TRAINING)",
    }
    return ", ".join(text for name, text in calls.items() if name in settings)


FORMAT = Format(
    trainer,
    suffix=".py",
    use=_use,
    workloads=("causal_lm",),
)
