"""Limits on the numbers in a config.json: larger models take hours and all memory to build.

Checked before anything is built, by names that configurations of transformers share. Largest known:
Llama 3.1 405B with 126 layers, Kimi K2 with 384 experts in each of 61 layers, vocabularies of
262,000 tokens.
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
