"""transformers' Trainer, with and without peft.

Read from transformers 5.23 (trainer.py, training_args.py, `_activation_checkpointing_enable`) and
peft 0.21 (`prepare_model_for_kbit_training`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.program.arguments import ProgramTraining
from tuner.program.reading import WITHOUT_MEMORY, adapters_by_calls, adds, training_by_calls
from tuner.program.trainer import Format, Planned, Reading, Trainer
from tuner.program.writing import (
    Settings,
    SettingsReader,
    machine_arguments,
    training_arguments,
    without_none,
)

_VERSIONS = {"transformers": "5.23", "peft": "0.21"}


def _plan(training: ProgramTraining) -> Planned:
    arguments, preparation = training["arguments"], training["preparation"]
    model, knobs = training_by_calls(training, checkpoints=False, precision="no")
    knobs["loss"] = "transformers"
    if training.has("preparation"):
        enables = preparation.take("use_gradient_checkpointing", True, quietly=True)
        if enables and not knobs["gradient_checkpointing"]:
            # Without a word about it PyTorch's own default counts, which is reentrant.
            inner = "gradient_checkpointing_kwargs.use_reentrant"
            reentrant = bool(preparation.take(inner, True, quietly=True))
            knobs |= {"gradient_checkpointing": True, "use_reentrant": reentrant}
    if training.has("adapted") or training.has("lora"):
        knobs |= adapters_by_calls(training)
    lengths = {repr(one.value): one.value for one in training.lengths if one.problem is None}
    if len(lengths) == 1:
        knobs["max_length"] = next(iter(lengths.values()))
    adds(arguments, {"predict_with_generate": "generation in evaluations"})
    training["trainer"].leave_out(("0", "1", "model", "args", "optimizers", *WITHOUT_MEMORY))
    arguments.leave_out((*WITHOUT_MEMORY, "tf32", "model_max_length"))
    return Planned(model, knobs)


# -- writing ----------------------------------------------------------------------


def _settings(chosen: SettingsReader, model: str | None) -> Settings:
    training = training_arguments(chosen) | machine_arguments(chosen)
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
    """Keyword arguments of `peft.prepare_model_for_kbit_training`; empty if it is not called.

    Its own defaults turn on reentrant checkpointing, whatever the trainer's arguments are.
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
    quantization = ", quantization_config=BitsAndBytesConfig(**QUANTIZATION)"
    calls = {
        "MODEL": f"from_pretrained(**MODEL{quantization if 'QUANTIZATION' in settings else ''})",
        "PREPARATION": "prepare_model_for_kbit_training(model, **PREPARATION)",
        "LORA": "get_peft_model(model, LoraConfig(**LORA))",
        "TOKENIZER": "tokenizer(texts, **TOKENIZER)",
        "TRAINING": "TrainingArguments(**TRAINING)",
    }
    return ", ".join(text for name, text in calls.items() if name in settings)


TRAINER = Trainer(
    "transformers",
    readings=(Reading("transformers' Trainer", "Trainer", _VERSIONS, _plan),),
    format=Format("trainer", _settings, suffix=".py", use=_use, workloads=("causal_lm",)),
)
