"""TRL's SFTTrainer and DPOTrainer.

Read from TRL 1.16: trainer/sft_trainer.py, dpo_trainer.py, base_config.py, utils.py
(`create_model_from_path`, `add_fused_lm_head`), model_config.py and scripts/sft.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from tuner.core.setup.common import QUANTIZED
from tuner.program.arguments import (
    EMULATE,
    Argument,
    Arguments,
    ProgramTraining,
    values_of_files,
    values_of_words,
)
from tuner.program.program import Program
from tuner.program.reading import (
    WITHOUT_MEMORY,
    adapters_by_calls,
    number,
    packed_rows,
    training_by_calls,
    unset,
)
from tuner.program.trainer import FILE, Format, Launch, Planned, Reading, SettingsFile, Trainer
from tuner.program.trainers.accelerate import launch as accelerate_launch
from tuner.program.writing import (
    Settings,
    SettingsReader,
    machine_arguments,
    training_arguments,
    without_none,
)

TRL_LAUNCHES = ("accelerate_config", "config_file", "num_processes", "num_machines")
"""Settings that `trl sft` passes on to `accelerate launch` (trl/cli, 1.16)."""

_VERSIONS = {"trl": "1.16", "transformers": "5.23", "peft": "0.21"}


def _sft(training: ProgramTraining) -> Planned:
    if training.trainer == "TRL":
        training = _as_script(training)
    model, knobs = _trained(training)
    arguments = training["arguments"]
    notes = _long_rows(arguments, str(knobs["attention"]))
    loss = arguments.take("loss_type", "nll", quietly=True)
    if loss not in ("nll", "chunked_nll", "dft"):
        arguments.refuse("loss_type", f"is {loss}: expected nll or dft")
    arguments.leave_out((*WITHOUT_MEMORY, *TRL_LAUNCHES, "pad_", "truncation"))
    return Planned(model, knobs, notes=notes)


def _dpo(training: ProgramTraining) -> Planned:
    model, knobs = _trained(training)
    arguments = training["arguments"]
    kind = arguments.take("loss_type", "sigmoid", quietly=True)
    if kind not in ("sigmoid", ["sigmoid"]):
        arguments.refuse("loss_type", f"is {kind}; predicted is sigmoid: {EMULATE}")
    unset(arguments, {
        "padding_free": "a batch as one long row",
        "sync_ref_model": "a second model in memory",
        "use_weighting": "a weighted loss",
    })  # fmt: skip
    unset(training["trainer"], {"ref_model": "a second model in memory"})
    precomputed = arguments.take("precompute_ref_log_probs", False, quietly=True)
    if not knobs["lora_rank"] and not precomputed:
        why = "all weights are trained beside a reference, which is a second model in memory"
        arguments.refuse("precompute_ref_log_probs", f"{why}, not predicted: {EMULATE}")
    if knobs["lora_rank"] and not precomputed:
        knobs["reference_pass"] = True
    if arguments.take("disable_dropout", True, quietly=True):
        knobs["lora_dropout"] = 0.0
    knobs["micro_batch"] *= 2  # the chosen and the rejected answer
    arguments.leave_out((*WITHOUT_MEMORY, "pad_", "truncation", "label_smoothing", "discopop"))
    note = "two sequences an example, the chosen and the rejected answer, both of full length"
    return Planned(model, knobs, sequences=2, notes=[note])


def _trained(training: ProgramTraining) -> tuple[str | None, dict[str, Any]]:
    arguments = training["arguments"]
    # TrainingArguments are taken over as they are, with their own defaults.
    own = arguments.title != "TrainingArguments"
    precision = "bf16" if own else "no"
    model, knobs = training_by_calls(training, checkpoints=own, precision=precision)
    knobs |= {"max_length": number(arguments, "max_length", 1024), "loss": "chunked"}
    trainer = training["trainer"]
    if trainer.take("peft_config") is not None or training.has("adapted") or training.has("lora"):
        knobs |= adapters_by_calls(training)
    if knobs["precision"] in QUANTIZED:
        knobs["adapter_dtype"] = "bf16"
    trainer.leave_out(("0", "1", "model", "args", "peft_config", "quantization", *WITHOUT_MEMORY))
    return model, knobs


def _long_rows(arguments: Arguments, kernel: str) -> list[str]:
    """Notes on packing that makes one row of a batch; other packing leaves rows of full length."""
    strategy = arguments.take("packing_strategy", "bfd", quietly=True)
    long = arguments.take("padding_free") or (
        arguments.take("packing", False) and strategy != "wrapped"
    )
    name = "padding_free" if arguments.take("padding_free") else "packing"
    return packed_rows(arguments, name, kernel) if long else []


_MODEL_NAMES = {
    "model_name_or_path": "0",
    "dtype": "dtype",
    "torch_dtype": "torch_dtype",
    "attn_implementation": "attn_implementation",
}
_LORA_NAMES = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}


def _as_script(training: ProgramTraining) -> ProgramTraining:
    """The file of `trl sft --config` as the calls that scripts/sft.py makes of it (ModelConfig)."""
    flat, found = training["arguments"], training.found
    bits = {"load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type"}
    own = {*bits, "use_peft", "use_bnb_nested_quant"}
    values = {
        name: argument
        for name, argument in flat.values.items()
        if name not in {*own, *_MODEL_NAMES, *_LORA_NAMES} and not name.startswith("lora_")
    }
    model = _renamed(flat, _MODEL_NAMES)
    model.setdefault("dtype", Argument("float32", "TRL's ModelConfig"))
    groups = {
        "arguments": Arguments(flat.title, values, found),
        "model": Arguments(flat.title, model, found),
    }
    if flat.take("use_peft", False, quietly=True):
        defaults = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
        lora = {n: Argument(v, "TRL's ModelConfig") for n, v in defaults.items()}
        groups["lora"] = Arguments(flat.title, {**lora, **_renamed(flat, _LORA_NAMES)}, found)
    if flat.take("load_in_4bit", quietly=True) or flat.take("load_in_8bit", quietly=True):
        nested = flat.take("use_bnb_nested_quant", False, quietly=True)
        quantization = {
            "bnb_4bit_quant_type": Argument("nf4", "TRL's ModelConfig"),
            "bnb_4bit_use_double_quant": Argument(nested, "TRL's ModelConfig"),
            "bnb_4bit_compute_dtype": model["dtype"],
            **{n: a for n, a in flat.values.items() if n in bits},
        }
        groups["quantization"] = Arguments(flat.title, quantization, found)
    return ProgramTraining(training.trainer, groups, found)


def _renamed(flat: Arguments, names: dict[str, str]) -> dict[str, Argument]:
    found = {}
    for name, argument in flat.values.items():
        first, dot, rest = name.partition(".")
        if first in names:
            found[f"{names[first]}{dot}{rest}"] = argument
    return found


# -- writing ----------------------------------------------------------------------


def _settings(chosen: SettingsReader, model: str | None) -> Settings:
    precision = chosen.text("precision")
    double = chosen.get("double_quant")
    chosen.implies("padding", "none")
    chosen.implies(
        "loss",
        "chunked",
        "its nll loss (TRL 1.16) never has the whole logits: it uses less memory than predicted",
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
        **training_arguments(chosen, loss=None),
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
        why = (
            "SFTTrainer (TRL 1.16) doesn't call prepare_model_for_kbit_training; weights keep "
            "their load dtype"
        )
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
        **chosen.adapter("lora_r"),
        "lora_target_modules": [targets] if isinstance(targets, str) else targets,
        "lora_modules_to_save": chosen.saved_modules,
    }


def _launch(program: Program) -> Launch:
    """`trl sft`, which runs `accelerate launch`; TRL ships some of its configurations."""
    said = {**values_of_files(program.sources), **values_of_words(program.command)}
    options = {name: said[name].value for name in TRL_LAUNCHES if name in said}
    named = options.pop("accelerate_config", None)
    if named is not None:
        spec = importlib.util.find_spec("trl")
        folders = spec.submodule_search_locations if spec else None
        shipped = Path(folders[0] if folders else "", "accelerate_configs", f"{named}.yaml")
        options["config_file"] = str(shipped if shipped.is_file() else named)
    return accelerate_launch(program, options)


TRAINER = Trainer(
    "TRL",
    SettingsFile(
        ("trl", "sft", "--config", FILE),
        (("model_name_or_path",), ("dataset_name", "datasets", "max_length", "packing")),
    ),
    (
        Reading("TRL SFTTrainer", "SFTTrainer", _VERSIONS, _sft),
        Reading("TRL SFTTrainer", "TRL", _VERSIONS, _sft),
        Reading("TRL DPOTrainer", "DPOTrainer", _VERSIONS, _dpo),
    ),
    Format(
        "trl",
        _settings,
        suffix=".yaml",
        use="trl sft --config FILE, with data set and schedule added",
        workloads=("causal_lm",),
    ),
    _launch,
)
