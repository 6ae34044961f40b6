"""Unsloth's FastLanguageModel and FastModel beside TRL's trainers and transformers' Trainer.

Read from Unsloth 2026.8: models/loader.py, llama.py and vision.py (`get_peft_model`) and rl.py (the
defaults of its trainers). Its kernels keep less of a layer than PyTorch's do, which is not
modelled: its memory is priced as that of the same training in PyTorch, an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tuner.program.arguments import Argument, Arguments, ProgramTraining
from tuner.program.reading import note_effects, only_run
from tuner.program.trainer import Planned, Reading, Trainer
from tuner.program.trainers.transformers import TRAINER as TRANSFORMERS
from tuner.program.trainers.trl import TRAINER as TRL

_WHERE = "Unsloth's default"

_DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "optim": "adamw_8bit",
}
_LORA: Mapping[str, Any] = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0}
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TRAINED_WHOLE = ("embed_tokens", "lm_head")
"""Names among the targets that Unsloth trains whole, in fp32."""

_ADAPTING = (
    "0", "bias", "random_state", "use_gradient_checkpointing", "loftq_config", "max_seq_length",
    "finetune_", "init_lora", "temporary", "task_type", "model",
)  # fmt: skip


def _reading(name: str) -> Reading:
    """The reading of trainer `name`, with Unsloth's model and defaults."""
    own = next(r for r in (*TRANSFORMERS.readings, *TRL.readings) if r.trainer == name)

    def plan(training: ProgramTraining) -> Planned:
        found = own.plan(_as_trl(training))
        found.knobs["adapter_dtype"] = "fp32"
        if name != "SFTTrainer":
            found.knobs["loss"] = "transformers"  # TRL's, which has all logits, is not replaced
        if found.model is not None and found.knobs["precision"] != "nf4":
            # `get_model_name` takes the 16-bit upload where 4 bits are not asked for.
            found.model = found.model.removesuffix("-unsloth-bnb-4bit").removesuffix("-bnb-4bit")
        training.found.at_most.append("Unsloth's kernels keep less of a layer than PyTorch's do")
        return found

    versions = dict([next(iter(own.versions.items()))])
    return Reading(f"Unsloth {name}", f"Unsloth {name}", versions, plan)


def _as_trl(training: ProgramTraining) -> ProgramTraining:
    """The calls of TRL that train the same."""
    loading, trainer, found = training["model"], training["trainer"], training.found
    usual = "bfloat16" if training.has_bf16 else "float16"
    dtype = loading.take("dtype", usual, quietly=True)
    named = [{"0": loading.values[name]} for name in ("0", "model_name") if name in loading]
    loaded = {"dtype": Argument(str(dtype), _WHERE), **(named[0] if named else {})}
    groups = {
        "model": Arguments(loading.title, loaded, found),
        "trainer": Arguments(trainer.title, {}, found),
    }
    bits = [word for word in ("load_in_8bit", "load_in_4bit", "load_in_16bit")
            if loading.take(word, word == "load_in_4bit", quietly=True)]  # fmt: skip
    is_full = bool(loading.take("full_finetuning", False, quietly=True))
    word = bits[0] if bits and not is_full else ""
    if word in ("load_in_8bit", "load_in_4bit"):
        made = {
            word: True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": dtype,
        }  # fmt: skip
        groups["quantization"] = Arguments(loading.title, _defaults(made), found)
    checkpoints = loading.take("use_gradient_checkpointing", "unsloth", quietly=True)
    lora = training["lora"]
    if training.has("lora") and not is_full:
        checkpoints = lora.take("use_gradient_checkpointing", "unsloth", quietly=True)
        groups["lora"] = Arguments(lora.title, _adapted(lora), found)
        if checkpoints == "unsloth":
            lora.bound("use_gradient_checkpointing", "offloading of checkpoints to the host")
    arguments = training["arguments"]
    checks = {
        "activation_checkpointing": bool(checkpoints),
        "gradient_checkpointing_kwargs.use_reentrant": True,
    }
    given = {**arguments.values, **_defaults(checks)}
    if not training.trainer.endswith(" Trainer"):  # TRL's, of which rl.py makes its own
        values = {name: one for name, one in trainer.values.items() if name not in _TRAINER}
        # Autocast follows the model, whatever the arguments say.
        is_bf16 = str(dtype).endswith("bfloat16")
        half = {"bf16": is_bf16, "fp16": str(dtype).endswith("float16") and not is_bf16}
        given = {**_defaults(_DEFAULTS), **values, **given, **_defaults(half)}
        given.pop("max_seq_length", None)
        if (length := _length(training)) is not None:
            given["max_length"] = length
    groups["arguments"] = Arguments(arguments.title, given, found, arguments.defaults)
    if loading.take("auto_model") is not None:
        only_run(loading, "auto_model", "a model of another class")
    note_effects(loading, "Unsloth")
    if lora.take("finetune_vision_layers", quietly=True):
        lora.adds("finetune_vision_layers", "the memory of images", "images")
    note_effects(lora, "Unsloth")
    loading.leave_out("Unsloth")
    return replace(training, groups=groups)


_TRAINER = ("0", "1", "model", "args", "tokenizer", "ref_model", "peft_config")
"""Arguments of a trainer that are not moved to its configuration."""


def _adapted(lora: Arguments) -> dict[str, Argument]:
    """The arguments of the LoraConfig that `get_peft_model` makes."""
    values = {**_defaults(_LORA), **lora.values}
    values = {name: argument for name, argument in values.items() if name not in _ADAPTING}
    given = lora.take("target_modules", quietly=True)
    targets = (given,) if isinstance(given, str) else tuple(given or _TARGETS)
    whole = tuple(name for name in targets if name in _TRAINED_WHOLE)
    where = lora.where("target_modules") if given else _WHERE
    values["target_modules"] = Argument(tuple(t for t in targets if t not in whole), where)
    if whole:
        saved = lora.take("modules_to_save", (), quietly=True)
        values["modules_to_save"] = Argument((*saved, *whole), where)
    lora.leave_out(more=(*_ADAPTING, *_LORA, "use_rslora", "use_dora", "modules_to_save"))
    return values


def _length(training: ProgramTraining) -> Argument | None:
    """The longest example: the trainer's word, else the model's (rl.py)."""
    is_sft = training.trainer.endswith("SFTTrainer")
    trainer, own = training["trainer"].values, training["arguments"].values
    said = [trainer.get("max_seq_length"), own.get("max_seq_length"), trainer.get("max_length")]
    said.append(own.get("max_length") if not is_sft else None)
    usual = training["model"].values.get("max_seq_length", Argument(2048, _WHERE))
    given = (one for one in said if one is not None and one.value is not None)
    return next(given, usual if is_sft else None)


def _defaults(values: Mapping[str, Any]) -> dict[str, Argument]:
    return {name: Argument(value, _WHERE) for name, value in values.items()}


TRAINER = Trainer(
    "Unsloth",
    readings=tuple(
        map(_reading, [f"{n}Trainer" for n in ("SFT", "DPO", "KTO", "ORPO", "CPO", "")])
    ),
)
