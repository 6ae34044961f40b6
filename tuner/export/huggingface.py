"""Formats of tools that train with transformers' Trainer."""

from __future__ import annotations

from typing import Any

from tuner.export.settings_reader import SettingsReader

Settings = dict[str, Any]

_OWN_PREPARATION = "the tool prepares quantised models in its own way"


def without_none(settings: Settings) -> Settings:
    """`settings` less those that the workload has no value for."""
    return {name: value for name, value in settings.items() if value is not None}


def trainer_arguments(chosen: SettingsReader) -> Settings:
    """Keyword arguments of `transformers.TrainingArguments`."""
    chosen.get("effective_batch")  # the product of the first two
    chosen.implies("training_loop", "trainer")
    chosen.implies("loss", "transformers")
    chosen.implies("fused_loss", False)
    mixed = chosen.text("mixed_precision")
    checkpointing = chosen.get("gradient_checkpointing")
    settings: Settings = {
        "per_device_train_batch_size": chosen.get("micro_batch"),
        "gradient_accumulation_steps": chosen.get("grad_accum"),
        "gradient_checkpointing": checkpointing,
        # As the workload does it; re-entrant checkpoints keep other tensors.
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if checkpointing else None,
        "optim": chosen.get("optimizer"),
        "bf16": mixed == "bf16",
        "fp16": mixed == "fp16",
        "tf32": True if chosen.text("precision") == "tf32" else None,
        "max_grad_norm": chosen.get("max_grad_norm"),
    }
    return without_none(settings)


def machine_arguments(chosen: SettingsReader) -> Settings:
    """Keyword arguments of `TrainingArguments` about the machine, where the space has them."""
    workers = chosen.get("num_workers")
    prefetch, persistent = chosen.get("prefetch_factor"), chosen.get("persistent_workers")
    chosen.leave_unless_empty("allocator", "set PYTORCH_CUDA_ALLOC_CONF in the environment")
    return without_none(
        {
            "torch_compile": chosen.get("torch_compile"),
            "use_liger_kernel": chosen.get("liger"),
            "dataloader_num_workers": workers,
            "dataloader_pin_memory": chosen.get("pin_memory"),
            # Without processes there is nothing to prefetch with, and Trainer refuses it.
            "dataloader_prefetch_factor": prefetch if workers else None,
            "dataloader_persistent_workers": persistent if workers else None,
        }
    )


def trainer(chosen: SettingsReader, model: str | None) -> Settings:
    """Dictionaries for a script around transformers' Trainer, peft and bitsandbytes."""
    training = trainer_arguments(chosen) | machine_arguments(chosen)
    chosen.leave(
        "kbit_preparation",
        {
            "peft": "call peft.prepare_model_for_kbit_training before get_peft_model",
            "none": "do not call peft.prepare_model_for_kbit_training",
        }.get(chosen.text("kbit_preparation"), "widen the norms to fp32 as TRL's SFTTrainer does"),
    )
    if not chosen.is_quantized:
        chosen.implies("kbit_preparation", chosen.text("kbit_preparation"))
    settings: Settings = {
        "MODEL": without_none(
            {
                "pretrained_model_name_or_path": model,
                "dtype": chosen.dtype,
                "attn_implementation": chosen.get("attention"),
            }
        ),
        "QUANTIZATION": _quantization(chosen),
        "LORA": without_none(
            {
                "r": chosen.get("lora_rank"),
                "lora_alpha": chosen.get("lora_alpha"),
                "lora_dropout": chosen.get("lora_dropout"),
                "target_modules": chosen.targets,
                "modules_to_save": chosen.saved_modules,
                "task_type": "CAUSAL_LM",
            }
        ),
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


def trl(chosen: SettingsReader, model: str | None) -> Settings:
    """The file of `trl sft --config`: fields of SFTConfig and ModelConfig (TRL 1.16)."""
    precision = chosen.text("precision")
    double = chosen.get("double_quant")
    targets = chosen.targets
    chosen.implies("padding", "none")
    settings = {
        "model_name_or_path": model,
        "dtype": chosen.dtype,
        "attn_implementation": chosen.get("attention"),
        **trainer_arguments(chosen),
        **machine_arguments(chosen),
        "max_length": chosen.get("max_length"),
        "use_peft": True,
        "lora_r": chosen.get("lora_rank"),
        "lora_alpha": chosen.get("lora_alpha"),
        "lora_dropout": chosen.get("lora_dropout"),
        "lora_target_modules": [targets] if isinstance(targets, str) else targets,
        "lora_modules_to_save": chosen.saved_modules,
        "load_in_4bit": True if precision == "nf4" else None,
        "bnb_4bit_quant_type": "nf4" if precision == "nf4" else None,
        "use_bnb_nested_quant": double if precision == "nf4" else None,
        "load_in_8bit": True if precision == "int8" else None,
    }
    if chosen.is_quantized:
        chosen.implies("kbit_preparation", "trl")
        if "kbit_preparation" in chosen.left_out:
            chosen.leave("kbit_preparation", "SFTTrainer widens only the norms to fp32 (trl)")
    else:
        chosen.get("kbit_preparation")
    return without_none(settings)


def axolotl(chosen: SettingsReader, model: str | None) -> Settings:
    """An Axolotl configuration (0.19), less data sets and schedule."""
    precision, targets = chosen.text("precision"), chosen.targets
    arguments = trainer_arguments(chosen)
    _own_preparation(chosen)
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
            "adapter": "qlora" if precision == "nf4" else "lora",
            "load_in_4bit": precision == "nf4",
            "load_in_8bit": precision == "int8",
            "bnb_config_kwargs": explicit if precision == "nf4" else None,
            "lora_r": chosen.get("lora_rank"),
            "lora_alpha": chosen.get("lora_alpha"),
            "lora_dropout": chosen.get("lora_dropout"),
            "lora_target_linear": True if isinstance(targets, str) else None,
            "lora_target_modules": targets if isinstance(targets, list) else None,
            "lora_modules_to_save": chosen.saved_modules,
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
            "torch_compile": chosen.get("torch_compile"),
            "dataloader_num_workers": workers,
            "dataloader_pin_memory": chosen.get("pin_memory"),
            "dataloader_prefetch_factor": prefetch if workers else None,
        }
    )


_FLASH_ATTN = {"eager": "disabled", "sdpa": "sdpa", "flash_attention_2": "fa2"}


def llamafactory(chosen: SettingsReader, model: str | None) -> Settings:
    """The file of `llamafactory-cli train` (0.9.5), less data set, template and schedule."""
    precision, targets = chosen.text("precision"), chosen.targets
    arguments = trainer_arguments(chosen)
    arguments.pop("gradient_checkpointing_kwargs", None)
    checkpointing = arguments.pop("gradient_checkpointing", None)
    _own_preparation(chosen)
    double, saved = chosen.get("double_quant"), chosen.saved_modules
    chosen.implies("padding", "none")
    # It loads in the dtype of the mixed precision, and in no other.
    if DTYPE_OF_MIXED.get(chosen.text("mixed_precision")) != chosen.dtype:
        which = "compute_dtype" if chosen.is_quantized else "precision"
        chosen.leave(which, "the tool keeps weights in the dtype of bf16 or fp16")
    return without_none(
        {
            "model_name_or_path": model,
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "lora",
            "lora_rank": chosen.get("lora_rank"),
            "lora_alpha": chosen.get("lora_alpha"),
            "lora_dropout": chosen.get("lora_dropout"),
            "lora_target": "all" if isinstance(targets, str) else ",".join(targets or []),
            "additional_target": ",".join(saved) if saved else None,
            "quantization_method": "bnb" if chosen.is_quantized else None,
            "quantization_bit": {"nf4": 4, "int8": 8}.get(precision),
            "quantization_type": "nf4" if precision == "nf4" else None,
            "double_quantization": double if precision == "nf4" else None,
            "cutoff_len": chosen.get("max_length"),
            "flash_attn": _FLASH_ATTN.get(chosen.text("attention")),
            "disable_gradient_checkpointing": not checkpointing,
            "use_reentrant_gc": False if checkpointing else None,
            **arguments,
            **machine_arguments(chosen),
        }
    )


DTYPE_OF_MIXED = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}


def _own_preparation(chosen: SettingsReader) -> None:
    if chosen.is_quantized:
        chosen.leave("kbit_preparation", _OWN_PREPARATION)
    else:
        chosen.get("kbit_preparation")
