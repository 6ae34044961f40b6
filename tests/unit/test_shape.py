"""The part of a configuration that a training's operators depend on."""

import pytest

from tuner.space.models.catalogue import get_entry
from tuner.space.models.config_fields import shape_of

LLAMA = get_entry("llama-3.1-8b").config
QWEN = get_entry("qwen3-4b").config
MISTRAL = get_entry("mistral-7b-v0.1").config


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-5},
        {"rope_scaling": None, "rope_theta": 1e4},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"max_position_embeddings": 4096, "pad_token_id": 0, "transformers_version": "4.43.0"},
        {"head_dim": 128},
        {"dtype": "float32"},
    ],
)
def test_numbers_in_tensors_are_no_part_of_it(changes):
    assert shape_of({**LLAMA, **changes}) == shape_of(LLAMA)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 2048},
        {"num_hidden_layers": 20},
        {"num_key_value_heads": 32},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"model_type": "mistral"},
        {"attention_dropout": 0.1},
    ],
)
def test_sizes_and_operators_are_part_of_it(changes):
    assert shape_of({**LLAMA, **changes}) not in (None, shape_of(LLAMA))


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "longrope"}},
        {"model_type": "gemma3_text"},
        {"a_field_of_tomorrow": 1},
    ],
)
def test_a_field_or_kind_that_is_not_known_has_no_shape(changes):
    assert shape_of({**LLAMA, **changes}) is None


def test_a_window_counts_where_it_is_used():
    assert shape_of({**QWEN, "sliding_window": 4096}) == shape_of(QWEN)
    used = {"use_sliding_window": True, "sliding_window": 4096}
    assert shape_of({**QWEN, **used}) != shape_of(QWEN)
    assert shape_of({**MISTRAL, "sliding_window": None}) != shape_of(MISTRAL)
