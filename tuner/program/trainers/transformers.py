"""transformers' Trainer, with and without peft.

Read from transformers 5.23 (trainer.py, training_args.py, `_activation_checkpointing_enable`) and
peft 0.21 (`prepare_model_for_kbit_training`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.program.arguments import ProgramTraining
from tuner.program.reading import adapters_by_calls, length_of_rows, note_effects, training_by_calls
from tuner.program.trainer import Format, Planned, Reading, Trainer
from tuner.program.writing import MACHINE, TRAINING, Settings, SettingsReader

_VERSIONS = {"transformers": "5.23", "peft": "0.21"}


def _plan(training: ProgramTraining) -> Planned:
    model, knobs = training_by_calls(training, checkpoints=False, precision="no")
    knobs["loss"] = "liger" if knobs.get("liger") else "transformers"
    if training.has("lora"):
        knobs |= adapters_by_calls(training)
    knobs |= length_of_rows(training)
    note_effects(training["arguments"], "Seq2SeqTrainingArguments")
    training["trainer"].leave_out("", "Trainer")
    training["arguments"].leave_out("", "transformers")
    return Planned(model, knobs)


# -- writing ----------------------------------------------------------------------


def _settings(chosen: SettingsReader, model: str | None) -> Settings:
    chosen.train_as_transformers()
    training = chosen.under(TRAINING, MACHINE)
    preparation: Settings = {}
    if chosen.text("kbit_preparation") == "peft" and chosen.is_quantized:
        # Its own defaults turn on reentrant checkpointing, whatever the trainer's arguments are.
        preparation = {
            "use_gradient_checkpointing": bool(training.get("gradient_checkpointing")),
            "gradient_checkpointing_kwargs": training.get("gradient_checkpointing_kwargs"),
        }
    elif chosen.text("kbit_preparation") == "trl" and chosen.is_quantized:
        chosen.leave("kbit_preparation", "widen the norms to fp32 as TRL's SFTTrainer does")
    quantization = chosen.under("load_in_8bit")
    in_4bit = chosen.under("bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_compute_dtype")
    if chosen.text("precision") == "nf4":
        quantization = {"load_in_4bit": True, **in_4bit}
    lora = chosen.lora(
        "r use_dora use_rslora lora_alpha lora_dropout target_modules modules_to_save"
    )
    settings: Settings = {
        "MODEL": {
            "pretrained_model_name_or_path": model,
            "dtype": chosen.dtype,
            **chosen.under("attn_implementation"),
        },
        "QUANTIZATION": quantization,
        "PREPARATION": preparation,
        "LORA": {**lora, "task_type": "CAUSAL_LM"} if lora else {},
        "TOKENIZER": {
            "truncation": True,
            **chosen.under("max_length"),
            "padding": "max_length" if chosen.text("padding") == "max_length" else None,
        },
        "TRAINING": training,
    }
    return {name: part for name, part in settings.items() if part}


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
    format=Format("trainer", _settings, _use, ".py"),
)
