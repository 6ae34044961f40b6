"""The part of a model's configuration that the operators of its training depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Types of models whose every field is below: modeling_*.py of transformers 5.23."""

_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "use_sliding_window": None,
    "sliding_window": None,
    "layer_types": None,
}
"""Fields that change operators or sizes, and may be left out."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)

_VALUES = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "max_position_embeddings",
        "max_window_layers",
        "model_type",
        "pad_token_id",
        "pretraining_tp",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Fields that change numbers in tensors, or nothing that is trained."""

_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embeddings whose frequencies do not depend on the length
(transformers/modeling_rope_utils.py)."""


def shape_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of a config.json that a training step's operators and sizes depend on.

    None for a type of models, or a field, of which that is not known: all of it counts then.
    """
    known = {*_SIZES, *_DEFAULTS, *_VALUES}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    if (
        config.get("model_type") not in _TYPES
        or not known.issuperset(config)
        or not set(_SIZES).issubset(config)
        or kind not in _STATIC_ROPE
    ):
        return None
    found = {name: config[name] for name in ("model_type", *_SIZES)}
    found |= {name: config.get(name, default) for name, default in _DEFAULTS.items()}
    heads = config["num_attention_heads"]
    found["num_key_value_heads"] = found["num_key_value_heads"] or heads
    found["head_dim"] = found["head_dim"] or config["hidden_size"] // heads
    kinds = {*(found["layer_types"] or ["full_attention"])}
    # mistral's window holds wherever it is given; the others' is switched on.
    has_window = found["use_sliding_window"] or (
        config["model_type"] == "mistral" and found["sliding_window"]
    )
    if not has_window and kinds == {"full_attention"}:
        found |= {"use_sliding_window": None, "sliding_window": None, "layer_types": None}
    return found
