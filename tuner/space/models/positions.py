"""The longest sequence of models that look positions up in a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ROWS_BEFORE = {
    "bert": 0,
    "bert-generation": 0,
    "big_bird": 0,
    "biogpt": 0,
    "blenderbot": 0,
    "blenderbot-small": 0,
    "camembert": 2,
    "codegen": 0,
    "ctrl": 0,
    "data2vec-text": 2,
    "distilbert": 0,
    "electra": 0,
    "ernie": 0,
    "gpt2": 0,
    "gpt_bigcode": 0,
    "gpt_neo": 0,
    "gptj": 0,
    "megatron-bert": 0,
    "mpnet": 2,
    "mpt": 0,
    "openai-gpt": 0,
    "opt": 0,
    "rembert": 0,
    "roberta": 2,
    "roberta-prelayernorm": 2,
    "roc_bert": 0,
    "xlm": 0,
    "xlm-roberta": 2,
    "xlm-roberta-xl": 2,
    "xmod": 2,
}
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
