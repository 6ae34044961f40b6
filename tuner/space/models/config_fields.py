"""The fields of a model's config.json: their limits, its positions, what operators depend on.

The limits are checked before anything is built, by names that configurations of transformers share:
larger models take hours and all memory. Largest known: Llama 3.1 405B with 126 layers, Kimi K2 with
384 experts in each of 61 layers, vocabularies of 262,000 tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_INTEGER = 1 << 40
"""Limit for all other integers: a maximum that means "none" is mostly written as 10^9 or 2^31."""

MAX_EXPERT_LAYERS = 50_000
"""Experts of all layers together: each is a module of its own."""

MAX_DEPTH = 20
"""Mappings and lists inside each other."""

_LIMITS: tuple[tuple[re.Pattern[str], int, int], ...] = (
    (re.compile(r"(num_hidden_layers|n_layers?|num_layers)"), 1, 2048),
    (re.compile(r"(num_)?(\w+_)?(layers|depths?)"), 0, 2048),
    (re.compile(r"num_attention_heads|num_key_value_heads|n_heads?"), 1, 1 << 14),
    (re.compile(r"(\w+_)?heads"), 0, 1 << 14),
    (re.compile(r"(vocab|hidden)_size|n_embd|d_model"), 1, 1 << 24),
    (re.compile(r"chunk_size"), -1, 1 << 24),  # Phi-4's audio: no chunks
    (re.compile(r"(\w+_)?(size|dim)|d_\w+|n_inner"), 0, 1 << 24),
    (re.compile(r"(\w+_)?experts(_\w+)?"), 0, 1 << 13),
    (re.compile(r"num_labels"), 0, 100_000),
)
"""Names, and the least and the most that they may be; the first that matches counts."""

_MAPS = {"id2label": 100_000, "label2id": 100_000}
"""Mappings that may be long."""


def problem_in(fields: Mapping[str, Any]) -> str | None:
    """A value in the `fields` of a config.json that no model can have; None if all are possible.

    Values of other types than numbers are for transformers to judge.
    """
    try:
        for path, name, value in _numbers(fields, "", 0):
            low, high = _limits(name)
            if not low <= value <= high:
                shown = value if abs(value) < 10**30 else f"a number of {len(str(value))} digits"
                return f"{path} is {shown}, and must be from {low} to {high}"
    except _TooLongError as error:
        return str(error)
    layers = max((v for _, n, v in _numbers(fields, "", 0) if n in _LAYERS), default=1)
    experts = max((v for _, n, v in _numbers(fields, "", 0) if n in EXPERTS), default=1)
    if layers * experts > MAX_EXPERT_LAYERS:
        return (
            f"{experts} experts in {layers} layers are {layers * experts}, and at most "
            f"{MAX_EXPERT_LAYERS} are taken"
        )
    return None


_LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
"""Fields of configurations that say how many experts a layer has."""


class _TooLongError(Exception):
    """The text says what is too long."""


def _limits(name: str) -> tuple[int, int]:
    for pattern, low, high in _LIMITS:
        if pattern.fullmatch(name):
            return low, high
    return -MAX_INTEGER, MAX_INTEGER


def _numbers(value: Any, path: str, depth: int) -> Iterator[tuple[str, str, int]]:
    """Each whole number with its path and the name that it stands under."""
    if depth > MAX_DEPTH:
        raise _TooLongError(f"{path[:100]} is nested more than {MAX_DEPTH} times")
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name in _MAPS:
                if hasattr(item, "__len__") and len(item) > _MAPS[name]:
                    raise _TooLongError(f"{name} holds {len(item)} labels; at most {_MAPS[name]}")
                continue
            yield from _numbers(item, f"{path}.{name}" if path else str(name), depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item, path, depth + 1)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield path, path.rpartition(".")[2], value


# -- positions ------------------------------------------------------------------------------------

_ROWS_BEFORE = {
    **dict.fromkeys((
        "bert", "bert-generation", "big_bird", "biogpt", "blenderbot", "blenderbot-small",
        "codegen", "ctrl", "distilbert", "electra", "ernie", "gpt2", "gpt_bigcode", "gpt_neo",
        "gptj", "megatron-bert", "mpt", "openai-gpt", "opt", "rembert", "roc_bert", "xlm",
    ), 0),
    **dict.fromkeys((
        "camembert", "data2vec-text", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
        "xlm-roberta-xl", "xmod",
    ), 2),
}  # fmt: skip
"""Types of models with such a table, and how many of the rows that the configuration counts are no
positions: in transformers' modeling_roberta.py and its like they begin after the padding index.
Tables of OPT and BioGPT have two rows more than their configuration says."""

_ROWS = ("n_positions", "max_position_embeddings", "max_seq_len")


def configured_positions(config: Mapping[str, Any]) -> int | None:
    """The tokens that a configuration of a language model allows for; None where it says none."""
    rows = next((config[key] for key in _ROWS if config.get(key) is not None), None)
    return None if rows is None else int(rows)


def table_positions(config: Mapping[str, Any]) -> int | None:
    """The longest sequence of a model that looks positions up; None for other models."""
    before = _ROWS_BEFORE.get(str(config.get("model_type")))
    rows = configured_positions(config)
    return None if before is None or rows is None else rows - before


def length_problem(positions: int | None, length: int, knob: str) -> tuple[str, str] | None:
    """The problem of a sequence of `length` tokens, and its remedy; None if the model takes it."""
    if positions is None or length <= positions:
        return None
    return (
        f"{knob} {length} is longer than the {positions} positions of the model",
        f"set {knob} to {positions} or less",
    )


# -- the fields that the operators of a training depend on ---------------------------------------

_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Types of models whose every field is below: modeling_*.py of transformers 5.23."""

_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "mlp_bias": False, "tie_word_embeddings": False,
    "use_sliding_window": None, "sliding_window": None, "layer_types": None,
}  # fmt: skip
"""Fields that change operators or sizes, and may be left out."""

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip

_VALUES = frozenset({
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_position_embeddings", "max_window_layers", "model_type", "pad_token_id", "pretraining_tp",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "torch_dtype",
    "transformers_version", "use_cache",
})  # fmt: skip
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
