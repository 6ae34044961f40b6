"""Tiny models and configurations for the tests of traces, and how to trace them."""

from typing import Any

from tuner.core.records import Configuration
from tuner.predict.tracing.trace import Trace, trace
from tuner.predict.training import get_workload

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
SEVEN_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

BASE = {
    "micro_batch": 2,
    "grad_accum": 2,
    "max_length": 32,
    "lora_rank": 8,
    "lora_dropout": 0.0,
    "lora_targets": SEVEN_LINEARS,
    "precision": "bf16",
    "gradient_checkpointing": False,
    "optimizer": "adamw_torch",
    "attention": "sdpa",
}


def tiny_config(name: str = "llama", **sizes: Any) -> Any:
    """A transformers configuration of two layers: "llama", "qwen2", "qwen3" or "gemma3"."""
    import transformers

    classes = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "gemma3": transformers.Gemma3TextConfig,
    }
    extra: dict[str, Any] = {}
    if name == "gemma3":
        extra = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    return classes[name](**{**SIZES, **extra, **sizes})


def configuration(**values: Any) -> Configuration:
    return Configuration({**BASE, **values})


def traced(
    model: Any = "llama", *, compute_capability: tuple[int, int] = (8, 0), **values: Any
) -> Trace:
    """The trace of a tiny model, or of a given transformers configuration."""
    model_config = tiny_config(model) if isinstance(model, str) else model
    return trace(
        get_workload("causal_lm"),
        model_config,
        configuration(**values),
        compute_capability=compute_capability,
    )
