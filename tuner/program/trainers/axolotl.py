"""Axolotl.

Read from 0.19: utils/schemas/, utils/config/__init__.py (`resolve_dtype`), loaders/model.py
(`_configure_embedding_dtypes`) and loaders/adapter.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner.core.records import KnobValue
from tuner.core.setup.common import QUANTIZED
from tuner.program import reading
from tuner.program.arguments import EMULATE, TABLES, Arguments, ProgramTraining
from tuner.program.trainer import FILE, Format, Launch, Planned, Reading, SettingsFile, Trainer
from tuner.program.trainers.accelerate import sharding
from tuner.program.writing import Settings, SettingsReader

_VERSIONS = {"axolotl": "0.19", "transformers": "5.16", "peft": "0.20"}

_CUT = "CutCrossEntropyPlugin"

_SMALLER = {"adamw_torch_8bit": "adamw_8bit", "adamw_torch_4bit": "adamw_8bit"}
"""torchao's optimizers, and bitsandbytes' with as many bits or more."""

_ROWS = {
    "sequence_len": 512,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
}
"""Names that are read and written, and their defaults."""


def _plan(training: ProgramTraining) -> Planned:
    file = training["arguments"]
    reading.note_effects(file, "Axolotl")
    plugins = _plugins(file)
    weights = "fp32"
    if file.take("bf16", "auto", quietly=True) in (True, "auto", "true", "full"):
        weights = "bf16"
    elif file.take("fp16") or file.take("load_in_8bit"):
        weights = "fp16"
    preferred = file.take("rl")
    sharded = _sharding(file)
    knobs: dict[str, Any] = {
        **reading.read(file, _ROWS),
        # `normalize_config` says so for all but preference training.
        **reading.checkpointing(file, default=False, reentrant=preferred is None),
        "optimizer": _optimizer(file, is_sharded="distributed" in sharded),
        "precision": weights,
        "mixed_precision": weights if weights != "fp32" else "no",
        "attention": _attention(file),
        "training_loop": "trainer",
        **reading.compiled(file),
        **_loss(file, plugins),
        # peft's preparation widens to fp32, and Axolotl narrows it again.
        "kbit_preparation": "none",
        "lora_rank": 0,
    }
    # `should_convert` of `ModelLoader`, of embeddings and norms
    keeps_fp32 = knobs["attention"] != "flash_attention_2" and knobs["loss"] != "chunked"
    adapter = file.take("adapter")
    if adapter in ("lora", "qlora"):
        linear = bool(file.take("lora_target_linear", False, quietly=True))
        knobs |= reading.adapters(file, TABLES["lora_names"]["Axolotl"], every_linear=linear)
        if file.take("load_in_8bit"):
            knobs |= {"precision": "int8", "compute_dtype": weights}
        elif file.take("load_in_4bit"):
            knobs |= {"precision": "nf4", "compute_dtype": weights, "double_quant": True}
        _fused_kernels(file)
    elif adapter is not None:
        reading.only_run(file, "adapter", f"{adapter} (modelled: lora, qlora)")
    elif weights != "fp32" and not sharded and keeps_fp32:
        text = "widening of embeddings and norms to fp32, which flash_attention_2 turns off,"
        file.adds("attn_implementation", text)
    knobs |= sharded
    notes = file.found.notes
    notes += [] if knobs["precision"] in QUANTIZED else [reading.NOT_COMPARED]
    if file.take("sample_packing", False, quietly=True):
        if file.take("attn_implementation") == "sdpa" or file.take("sdp_attention"):
            # `sdpa_varlen`: samples side by side, without a mask.
            knobs["attention"] = "flash_attention_2"
        reading.pack(knobs, notes)
    sequences = _several_sequences(file, knobs)
    if file.take("processor_type"):
        file.adds("processor_type", "the memory of images that it may be trained with", "images")
    model = file.take("base_model")
    file.leave_out("", "Axolotl")
    return Planned(model, knobs, sequences, packs_codes=True)


def _plugins(file: Arguments) -> list[str]:
    """The classes of the plugins; those that change what is predicted are refused."""
    names = [path.rpartition(".")[2] for path in reading.listed(file, "plugins")]
    for name in names:
        if name not in TABLES["plugins"]:
            file.refuse("plugins", f"has {name}, which is not predicted: {EMULATE}")
        elif saves := TABLES["plugins"][name]:
            file.bound("plugins", saves)
    return names


def _loss(file: Arguments, plugins: Sequence[str]) -> dict[str, Any]:
    """Liger's loss and cut cross entropy, which never have the whole logits, as TRL's."""
    given = {
        "cut_cross_entropy": file.take("cut_cross_entropy", _CUT in plugins, quietly=True),
        "liger_fused_linear_cross_entropy": file.take("liger_fused_linear_cross_entropy"),
    }
    for name in [name for name, value in given.items() if value]:
        file.found.left_out.append(f"{file.where(name)}: as TRL's chunked loss")
        return {"loss": "chunked"}
    return {"loss": "transformers", "fused_loss": bool(file.take("liger_cross_entropy"))}


def _optimizer(file: Arguments, *, is_sharded: bool) -> str:
    chosen = str(file.take("optimizer", "adamw_torch_fused"))
    if chosen in _SMALLER:
        # torchao's can be sharded, which bitsandbytes' cannot.
        held = "adamw_torch_fused" if is_sharded else _SMALLER[chosen]
        file.bound("optimizer", f"{chosen} in place of {held}")
        return held
    return reading.optimizer(file, "optimizer", "adamw_torch_fused")


def _sharding(file: Arguments) -> dict[str, KnobValue]:
    """Parameters of FSDP; empty without it."""
    config, prefix = "fsdp_config", "fsdp_"
    named = {name: a.value for name, a in file.values.items() if name.startswith(f"{config}.")}
    file.taken |= {config, "fsdp", f"{prefix}version"}
    if not named and not reading.listed(file, "fsdp"):
        return {}
    settings = {n.removeprefix(f"{config}.").removeprefix(prefix): v for n, v in named.items()}
    if str(file.take(f"{prefix}version") or settings.pop("version", 1)) != "2":
        # Of Llama-2-7B on 8 H100 (torchtitan's docs/fsdp.md).
        text = f"{file.where(config)}: FSDP1, as FSDP2, whose peak is about 7 % lower"
        file.found.left_out.append(text)
    settings["version"] = 2
    if settings.pop("offload_params", False):
        file.bound(config, "offload of weights")
    knobs, problems = sharding(settings, file.where(config))
    file.found.problems += problems
    return knobs


def _several_sequences(file: Arguments, knobs: dict[str, Any]) -> int:
    """The sequences of an example, of preference training and of a reward model."""
    kind, notes = file.take("rl"), file.found.notes
    if kind in ("dpo", "ipo", "kto"):
        knobs["reference_model"] = not knobs["lora_rank"] or bool(file.take("rl_adapter_ref_model"))
        return reading.preference(knobs, notes, 1 if kind == "kto" else 2)
    if kind not in (None, "orpo"):
        reading.only_run(file, "rl", f"{kind} (modelled: dpo, ipo, kto, orpo)")
    is_reward = bool(file.take("reward_model"))
    if is_reward:
        knobs |= {"num_labels": 1, "loss": "transformers", "fused_loss": False}
    return reading.preference(knobs, notes, refers=False) if is_reward or kind == "orpo" else 1


def _attention(file: Arguments) -> str:
    if file.take("flash_attention"):
        return "flash_attention_2"
    if file.take("eager_attention"):
        return "eager"
    for name in ("xformers_attention", "flex_attention"):
        if file.take(name):
            file.found.left_out.append(f"{file.where(name)}, as flash_attention_2")
            return "flash_attention_2"
    return reading.attention(file, "attn_implementation")


def _fused_kernels(file: Arguments) -> None:
    """Name LoRA kernels that are there unless they are turned off."""
    names = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
    given = [file.take(name) for name in names]
    is_int8 = file.take("adapter") == "lora" and file.take("load_in_8bit")
    if any(given) or (not is_int8 and all(value is None for value in given)):
        file.found.left_out.append("Axolotl's LoRA kernels (lora_mlp_kernel and others)")


# -- writing ----------------------------------------------------------------------


def _settings(chosen: SettingsReader, model: str | None) -> Settings:
    chosen.train_as_transformers()
    chosen.leave_preparation()
    if not chosen.has_adapters and chosen.dtype != "float32":
        chosen.leave("precision", "the tool widens embeddings and norms to fp32 to train them")
    targets = chosen.lora("target_modules").get("target_modules")
    is_4bit = chosen.text("precision") == "nf4"
    quantization = "bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_compute_dtype"
    given = chosen.under(quantization)
    return {
        "base_model": model,
        "adapter": ("qlora" if is_4bit else "lora") if chosen.has_adapters else None,
        **chosen.lora("peft_use_dora peft_use_rslora lora_r lora_alpha lora_dropout"),
        "lora_target_linear": isinstance(targets, str) or None,
        "lora_target_modules": targets if isinstance(targets, list) else None,
        **chosen.lora("lora_modules_to_save"),
        "load_in_4bit": False,
        "load_in_8bit": False,
        "tf32": False,
        **chosen.under("load_in_4bit load_in_8bit tf32"),
        "bnb_config_kwargs": given if is_4bit else None,
        "sample_packing": False,
        **chosen.under(
            *_ROWS,
            "pad_to_sequence_len optimizer gradient_checkpointing gradient_checkpointing_kwargs",
            "bf16 fp16 attn_implementation deepspeed torch_compile dataloader_num_workers",
            "dataloader_pin_memory dataloader_prefetch_factor",
        ),
    }


TRAINER = Trainer(
    "Axolotl",
    SettingsFile(
        ("axolotl", "train", FILE),
        (("base_model",), ("micro_batch_size", "sequence_len", "datasets")),
        (("-m", "axolotl.cli.train"),),
    ),
    (Reading("Axolotl", "Axolotl", _VERSIONS, _plan),),
    Format("axolotl", _settings, "axolotl train FILE, with data sets and schedule added"),
    lambda program: Launch(processes=None),  # it starts a process on each GPU
)
