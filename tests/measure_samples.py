"""A tiny job for real trials on the processor, in the test's own process."""

import json
from pathlib import Path
from typing import Any

from tuner.core.records import Configuration
from tuner.space.gpus import get_gpu
from tuner.trial.base import MeasureOptions, TrialJob

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}

KNOBS = {
    "micro_batch": 2,
    "max_length": 32,
    "grad_accum": 2,
    "lora_rank": 8,
    "lora_targets": ("q_proj", "v_proj"),
    "precision": "fp32",
    "gradient_checkpointing": True,
    "optimizer": "adamw_torch",
    "attention": "sdpa",
}


def knobs(**changes: Any) -> Configuration:
    return Configuration({**KNOBS, **changes})


def model_folder(folder: Path, **changes: Any) -> str:
    """A folder with the config of a tiny llama: a model's name for a job."""
    from transformers import LlamaConfig

    config = LlamaConfig(**{**SHAPE, **changes}, architectures=["LlamaForCausalLM"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return str(folder)


def job(model: str, **changes: Any) -> TrialJob:
    return TrialJob("causal_lm", model, get_gpu("a6000"), **changes)


def quick(**changes: Any) -> MeasureOptions:
    """Few steps: three, unless the rate is known sooner."""
    return MeasureOptions(device="cpu", **{"budget_s": 0.0, **changes})
