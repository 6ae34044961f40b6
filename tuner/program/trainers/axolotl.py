"""Axolotl.

Read from 0.19: utils/schemas/, utils/config/__init__.py (`resolve_dtype`), loaders/model.py
(`_configure_embedding_dtypes`) and loaders/adapter.py.
"""

from __future__ import annotations

from typing import Any

from tuner.core.setup.common import QUANTIZED
from tuner.program.arguments import EMULATE, Arguments, ProgramTraining
from tuner.program.reading import (
    NOT_COMPARED,
    WITHOUT_MEMORY,
    adapters,
    attention,
    checkpointing,
    number,
    optimizer,
    packed_rows,
    unset,
)
from tuner.program.trainer import FILE, Format, Launch, Planned, Reading, SettingsFile, Trainer
from tuner.program.writing import Settings, SettingsReader, training_arguments, without_none

_VERSIONS = {"axolotl": "0.19", "transformers": "5.16", "peft": "0.20"}

_NOT_PREDICTED = {
    "plugins": "what a plugin does (cut cross entropy, Liger)",
    "cut_cross_entropy": "cut cross entropy",
    "chunked_cross_entropy": "chunked cross entropy",
    "liger_fused_linear_cross_entropy": "Liger's loss",
    "deepspeed": "training with DeepSpeed",
    "fsdp": "training with FSDP",
    "fsdp_config": "training with FSDP",
    "torch_compile": "what compiled code takes",
    "activation_offloading": "offloading of activations",
    "selective_checkpointing": "checkpointing of some operators",
    "rl": "preference training",
    "unfrozen_parameters": "training of some weights",
    "relora": "ReLoRA",
    "qat": "quantisation-aware training",
    "gptq": "GPTQ",
    "embeddings_skip_upcast": "embeddings that are not widened",
    "tensor_parallel_size": "tensor parallelism",
    "context_parallel_size": "context parallelism",
}

_LORA = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "use_dora": "peft_use_dora",
    "use_rslora": "peft_use_rslora",
}

_WITHOUT_MEMORY = (
    "base_model", "tokenizer", "model_type", "is_", "trust_remote", "special_tokens", "tokens",
    "chat_template", "strict", "excess_length", "pad_to", "train_on", "group_by", "tf32",
    "debug", "mlflow", "comet", "early_stopping", "auto_resume", "lora_alpha", "resize_token",
    "lora_fan", "weight", "profiler", "flash_attention", "sdp_attention", "eval_sample_packing",
    "load_best", "bfloat16", "float16", "datasets", "sequence_len", "type_of", "hub",
)  # fmt: skip


def _plan(training: ProgramTraining) -> Planned:
    file = training["arguments"]
    unset(file, _NOT_PREDICTED)
    weights = _dtype(file)
    knobs: dict[str, Any] = {
        "micro_batch": number(file, "micro_batch_size", 1),
        "grad_accum": number(file, "gradient_accumulation_steps", 1),
        # `normalize_config` says so for all but preference training.
        **checkpointing(file, default=False, reentrant=True),
        "max_length": number(file, "sequence_len", 512),
        "optimizer": optimizer(file, "optimizer", "adamw_torch_fused"),
        "max_grad_norm": number(file, "max_grad_norm", 1.0),
        "precision": weights,
        "mixed_precision": weights if weights != "fp32" else "no",
        "attention": _attention(file),
        "training_loop": "trainer",
        "loss": "transformers",
        # peft's preparation widens to fp32, and Axolotl narrows it again.
        "kbit_preparation": "none",
        "lora_rank": 0,
    }
    adapter = file.take("adapter")
    if adapter in ("lora", "qlora"):
        linear = bool(file.take("lora_target_linear", False, quietly=True))
        knobs |= adapters(file, _LORA, every_linear=linear)
        knobs |= _quantized(file, weights)
        _fused_kernels(file)
    elif adapter is not None:
        file.refuse("adapter", f"is {adapter}; predicted are lora, qlora and none: {EMULATE}")
    elif weights != "fp32":
        why = (
            f"are widened to fp32 where all weights are trained, which is not predicted: {EMULATE}"
        )
        file.refuse("embeddings and norms", why)
    notes = [] if knobs["precision"] in QUANTIZED else [NOT_COMPARED]
    if file.take("sample_packing", False, quietly=True):
        notes += packed_rows(knobs)
    model = file.take("base_model")
    file.leave_out((*WITHOUT_MEMORY, *_WITHOUT_MEMORY))
    return Planned(model, knobs, notes=notes)


def _dtype(file: Arguments) -> str:
    if file.take("bf16", "auto", quietly=True) in (True, "auto", "true", "full"):
        return "bf16"
    return "fp16" if file.take("fp16") or file.take("load_in_8bit") else "fp32"


def _attention(file: Arguments) -> str:
    if file.take("flash_attention"):
        return "flash_attention_2"
    if file.take("eager_attention"):
        return "eager"
    return attention(file, "attn_implementation")


def _quantized(file: Arguments, weights: str) -> dict[str, Any]:
    if file.take("load_in_8bit"):
        return {"precision": "int8", "compute_dtype": weights}
    if file.take("load_in_4bit"):
        return {"precision": "nf4", "compute_dtype": weights, "double_quant": True}
    return {}


def _fused_kernels(file: Arguments) -> None:
    """Name LoRA kernels that are there unless they are turned off."""
    names = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
    given = [file.take(name) for name in names]
    is_int8 = file.take("adapter") == "lora" and file.take("load_in_8bit")
    if any(given) or (not is_int8 and all(value is None for value in given)):
        file.found.left_out.append("Axolotl's LoRA kernels (lora_mlp_kernel and others)")


# -- writing ----------------------------------------------------------------------


def _settings(chosen: SettingsReader, model: str | None) -> Settings:
    precision = chosen.text("precision")
    arguments = training_arguments(chosen)
    chosen.leave_preparation()
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
            **_adapters(chosen, precision),
            "load_in_4bit": precision == "nf4",
            "load_in_8bit": precision == "int8",
            "bnb_config_kwargs": explicit if precision == "nf4" else None,
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
            "deepspeed": arguments.get("deepspeed"),
            "torch_compile": chosen.get("torch_compile"),
            "dataloader_num_workers": workers,
            "dataloader_pin_memory": chosen.get("pin_memory"),
            "dataloader_prefetch_factor": prefetch if workers else None,
        }
    )


def _adapters(chosen: SettingsReader, precision: str) -> Settings:
    if not chosen.has_adapters:
        if chosen.dtype != "float32":
            chosen.leave("precision", "the tool widens embeddings and norms to fp32 to train them")
        return {}
    targets = chosen.targets
    return {
        "adapter": "qlora" if precision == "nf4" else "lora",
        **chosen.adapter("lora_r", "peft_"),
        "lora_target_linear": True if isinstance(targets, str) else None,
        "lora_target_modules": targets if isinstance(targets, list) else None,
        "lora_modules_to_save": chosen.saved_modules,
    }


TRAINER = Trainer(
    "Axolotl",
    SettingsFile(
        ("axolotl", "train", FILE),
        (("base_model",), ("micro_batch_size", "sequence_len", "datasets")),
    ),
    (Reading("Axolotl", "Axolotl", _VERSIONS, _plan),),
    Format(
        "axolotl",
        _settings,
        suffix=".yaml",
        use="axolotl train FILE, with data sets and schedule added",
        workloads=("causal_lm",),
    ),
    lambda program: Launch(processes=None),  # it starts a process on each GPU
)
