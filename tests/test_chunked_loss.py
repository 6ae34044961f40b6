"""The loss of TRL's trainers, adapters in bf16 and the pass of a reference."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.measure_samples import SHAPE, knobs
from tuner.core.errors import InputError
from tuner.core.records import Memory
from tuner.cost.memory import Course, peak_memory
from tuner.predict.compiler.structure import TILE_TOKENS
from tuner.predict.tracing.trace import trace
from tuner.predict.training import get_workload
from tuner.predict.training.losses import TILE_WORDS, use_chunked_loss

WORDS = 128256


def traced(**changes: Any) -> tuple[Memory, int]:
    config = LlamaConfig(**{**SHAPE, "vocab_size": WORDS})
    settings = knobs(micro_batch=8, max_length=1024, mixed_precision="bf16", **changes)
    found = trace(get_workload("causal_lm"), config, settings, compute_capability=(8, 6))
    return peak_memory(Course.of(found.timeline), context_bytes=0), sum(found.gradient_bytes)


def test_the_kernel_of_trl_computes_the_loss_and_gradient_of_transformers():
    pytest.importorskip("trl.kernels")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    tokens = torch.randint(0, 512, (2, 16))
    labels = tokens.clone()
    labels[:, :5] = -100
    plain = model(input_ids=tokens, labels=labels).loss
    plain.backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    use_chunked_loss(model, real=True)
    chunked = model(input_ids=tokens, labels=labels)
    chunked.loss.backward()
    assert chunked.logits is None
    torch.testing.assert_close(chunked.loss, plain)
    torch.testing.assert_close(model.lm_head.weight.grad, gradient)


def test_there_are_tiles_in_place_of_logits():
    logits = 8 * 1024 * WORDS
    whole, _ = traced()
    tiles, _ = traced(loss="chunked")
    assert whole.peak_allocated_bytes > 6 * logits
    assert TILE_TOKENS * TILE_WORDS * 2 < tiles.peak_allocated_bytes < 2 * logits


def test_adapters_in_bf16_take_half():
    _, wide = traced()
    _, narrow = traced(adapter_dtype="bf16")
    assert 2 * narrow == wide


def test_the_reference_of_all_weights_would_be_a_second_model():
    with pytest.raises(InputError, match="reference_pass"):
        traced(reference_pass=True, lora_rank=0)


def test_gradients_of_tied_embeddings_are_added_in_place():
    config = LlamaConfig(**{**SHAPE, "vocab_size": WORDS, "tie_word_embeddings": True})
    settings = knobs(
        micro_batch=1, max_length=64, lora_rank=0, loss="chunked", optimizer="adamw_torch_fused"
    )
    found = trace(get_workload("causal_lm"), config, settings, compute_capability=(8, 6))
    blocks, live, most = found.timeline.blocks, set(), 0
    for index, change in found.timeline.events:
        if blocks[index].shape == (WORDS, config.hidden_size):
            live = live | {index} if change > 0 else live - {index}
            most = max(most, len(live))
    # The weight, its two moments, the gradient of the micro-batch before, that of the head and that
    # of the embedding: no sum beside them.
    assert most == 6
