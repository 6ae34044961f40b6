"""LLaMA-Factory.

Read from 0.9.5: hparams/, model/adapter.py (`init_adapter`), model/patcher.py,
model/loader.py, model/model_utils/checkpointing.py and quantization.py.
"""

from __future__ import annotations

from typing import Any

from tuner.program import reading
from tuner.program.arguments import DTYPES, EMULATE, TABLES, Arguments, ProgramTraining
from tuner.program.program import Program
from tuner.program.trainer import FILE, Format, Launch, Planned, Reading, SettingsFile, Trainer
from tuner.program.writing import MACHINE, TRAINING, Settings, SettingsReader

_VERSIONS = {"llamafactory": "0.9.5", "transformers": "5.6", "peft": "0.18"}

_ATTENTION = {"sdpa": "sdpa", "auto": "sdpa", "disabled": "eager", "fa2": "flash_attention_2"}
_ATTENTION["fa3"] = _ATTENTION["fa2"]  # both keep their output and a number for each row

_WITHOUT_REFERENCE = ("orpo", "simpo")
"""Kinds of `pref_loss` without a reference model."""

_ALLOWED = {
    "stage": ("sft", "pt", "dpo", "kto", "rm"),
    "finetuning_type": ("lora", "full", "freeze"),
}


def _plan(training: ProgramTraining) -> Planned:
    file = training["arguments"]
    reading.note_effects(file, "LLaMA-Factory")
    for name, allowed in _ALLOWED.items():
        value = file.take(name, allowed[0])
        if value not in allowed:
            reading.only_run(file, name, f"{value} (modelled: {', '.join(allowed)})")
    stage = file.take("stage", quietly=True)
    has_logits = stage not in (None, "pt", "sft")
    knobs: dict[str, Any] = reading.trainer_arguments(file, checkpoints=False, precision="no")
    knobs["gradient_checkpointing"] = not file.take("disable_gradient_checkpointing", False)
    knobs["use_reentrant"] = bool(file.take("use_reentrant_gc", True))
    pure = bool(file.take("pure_bf16", False, quietly=True))
    computed = "bf16" if pure else str(knobs["mixed_precision"])
    computed = reading.STORED if computed == "no" else computed  # by its quantised layers
    kind = file.take("finetuning_type", "lora", quietly=True)
    is_full = kind != "lora"
    if kind == "freeze":
        file.bound("finetuning_type", "training of some layers only")
    if (attention := str(file.take("flash_attn", "auto"))) not in _ATTENTION:
        file.refuse("flash_attn", f"is {attention}; predicted: {', '.join(_ATTENTION)}")
    knobs |= {
        # It loads in the dtype of the checkpoint. What is trained is widened to fp32; adapters are
        # anyway.
        "precision": "fp32" if is_full and not pure else reading.STORED,
        "attention": _ATTENTION.get(attention, "sdpa"),
        "max_length": reading.number(file, "cutoff_len", 2048),
        "loss": "transformers",
        "kbit_preparation": "none",
        "lora_rank": 0,
    }
    liger = reading.with_liger(file, "enable_liger_kernel")
    if liger and has_logits:  # of which it computes the loss by another kernel then
        file.bound("enable_liger_kernel", "Liger's kernels beside a metric")
    elif liger:
        knobs |= {**liger, "loss": "liger"}
    if file.take("use_muon"):
        knobs["optimizer"] = "muon"
    file.take("packing")  # whole rows of one length are what is predicted anyway
    if file.take("neat_packing"):
        reading.pack(knobs, file.found.notes)
    if not is_full:
        knobs |= reading.adapters(
            file, TABLES["lora_names"]["LLaMA-Factory"], every_linear="lora_target" not in file
        )
    knobs |= _quantized(file, computed)
    sequences = _several_sequences(file, knobs)
    file.adds("image_max_pixels", "the memory of images that it may be trained with", "images")
    model = file.take("model_name_or_path")
    file.leave_out("", "LLaMA-Factory")
    if knobs["precision"] == "int8" or stage in ("dpo", "kto") or file.take("use_muon"):
        file.found.notes.append(reading.NOT_COMPARED)
    return Planned(model, knobs, sequences, packs_codes=True)


def _several_sequences(file: Arguments, knobs: dict[str, Any]) -> int:
    """The sequences of an example, of preference training and of a reward model."""
    stage = file.take("stage", quietly=True)
    refers = file.take("pref_loss", "sigmoid", quietly=True) not in _WITHOUT_REFERENCE
    refers = stage == "kto" or (stage == "dpo" and refers)
    if stage == "rm":
        # The logits are made, and nothing is asked of them: the loss is of another head.
        file.bound("stage", "a reward in place of the loss over the logits")
    elif refers and not knobs["lora_rank"]:
        file.refuse("stage", f"has a second model in memory, which is not predicted: {EMULATE}")
    if stage not in ("rm", "dpo", "kto"):
        return 1
    sequences = 1 if stage == "kto" else 2
    return reading.preference(knobs, file.found.notes, sequences, refers=refers)


def _quantized(file: Arguments, computed: str) -> dict[str, Any]:
    bits = file.take("quantization_bit")
    if bits is None:
        return {}
    method = file.take("quantization_method", "bnb", quietly=True)
    if bits not in (4, 8) or method not in ("bnb", "bitsandbytes"):
        file.refuse("quantization_bit", f"is {bits} by {method}; predicted: 4 or 8 by bnb")
    file.take("quantization_type")  # fp4 has the same sizes
    return {
        "precision": "nf4" if bits == 4 else "int8",
        "compute_dtype": computed,
        "double_quant": bool(file.take("double_quantization", True)),
    }


# -- writing ----------------------------------------------------------------------


def _settings(chosen: SettingsReader, model: str | None) -> Settings:
    chosen.train_as_transformers()
    chosen.leave_preparation()
    chosen.implies("padding", "none")
    precision, is_full = chosen.text("precision"), not chosen.has_adapters
    # It loads in the dtype of the mixed precision, and in no other; where it trains all weights it
    # can widen them.
    said = is_full and chosen.dtype in ("float32", "bfloat16")
    if not said and DTYPES[chosen.dtype] != (chosen.text("mixed_precision").replace("no", "fp32")):
        which = "compute_dtype" if chosen.is_quantized else "precision"
        chosen.leave(which, "the tool keeps weights in the dtype of bf16 or fp16")
    training = chosen.under(TRAINING, MACHINE)
    reentrant = training.pop("gradient_checkpointing_kwargs", {})
    checkpoints = training.pop("gradient_checkpointing", None)
    attention = {ours: theirs for theirs, ours in reversed(_ATTENTION.items())}
    targets, saved = (chosen.lora(n).get(n) for n in ("target_modules", "modules_to_save"))
    if not is_full:
        targets = "all" if isinstance(targets, str) else ",".join(targets or ())
    return {
        "model_name_or_path": model,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full" if is_full else "lora",
        "pure_bf16": chosen.dtype == "bfloat16" if is_full else None,
        **chosen.lora("use_dora use_rslora lora_rank lora_alpha lora_dropout"),
        "lora_target": targets,
        "additional_target": ",".join(saved) if saved else None,
        "quantization_method": "bnb" if chosen.is_quantized else None,
        "quantization_bit": {"nf4": 4, "int8": 8}.get(precision),
        **chosen.under("quantization_type double_quantization cutoff_len"),
        "flash_attn": attention.get(chosen.text("attention")),
        "disable_gradient_checkpointing": not checkpoints,
        "use_reentrant_gc": reentrant.get("use_reentrant"),
        **training,
    }


def _launch(program: Program) -> Launch:
    """A process on each GPU, or as many as variables say (launcher.py)."""
    found, given = Launch(processes=None), program.environment
    if "NPROC_PER_NODE" in given:
        found.processes = found.whole("NPROC_PER_NODE", given["NPROC_PER_NODE"])
    found.set_machines("NNODES", given.get("NNODES", "1"))
    return found


TRAINER = Trainer(
    "LLaMA-Factory",
    SettingsFile(
        ("llamafactory-cli", "train", FILE),
        (("model_name_or_path",), ("finetuning_type", "cutoff_len", "stage")),
        (("lmf", "train"), ("-m", "llamafactory.cli", "train")),
        b"from llamafactory.train.tuner import run_exp",
        takes_assignments=True,
    ),
    (Reading("LLaMA-Factory", "LLaMA-Factory", _VERSIONS, _plan),),
    Format(
        "llamafactory",
        _settings,
        "llamafactory-cli train FILE, with data set, template and schedule added",
    ),
    _launch,
)
