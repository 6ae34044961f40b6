"""What the recorder notes of single operators: their FLOPs, and which results are logits."""

from __future__ import annotations

import pytest
import torch
from estimate_samples import SIZES, tiny_config, traced

from tuner.core.records import MemoryCategory
from tuner.cost.memory import category_of
from tuner.predict.tracing.recorder import Recorder

M, N, K, BATCH = 3, 5, 7, 2


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def product_of(run) -> tuple[int, tuple[int, ...] | None]:
    """FLOPs and shape of the only product that `run` runs."""
    recorder = Recorder(workspace_bytes=0)
    with recorder:
        recorder.start()
        run()
    (work,) = [w for w in recorder.timeline.works if w.kind == "matmul"]
    return work.flops, work.shape


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.addmm(meta(M, N), meta(M, K), meta(K, N)),
        lambda: meta(M, N).addmm_(meta(M, K), meta(K, N)),
        lambda: torch.mm(meta(M, K), meta(K, N)),
    ],
)
def test_products_that_add_in_place_count_as_the_others(run):
    assert product_of(run) == (2 * M * N * K, (1, M, N, K))


def test_batched_products_that_add_in_place_count_too():
    def run() -> None:
        meta(BATCH, M, N).baddbmm_(meta(BATCH, M, K), meta(BATCH, K, N))

    assert product_of(run) == (2 * BATCH * M * N * K, (BATCH, M, N, K))


def test_scores_are_no_logits_where_sequences_are_as_long_as_the_vocabulary_is_wide():
    """Eager attention's scores are [batch, heads, length, length]."""
    length = SIZES["vocab_size"]
    sizes = {"max_position_embeddings": length}

    def logits_of(attention: str) -> set[tuple[int, ...]]:
        timeline = traced(
            tiny_config("llama", **sizes), attention=attention, max_length=length, precision="bf16"
        ).timeline
        return {b.shape for b in timeline.blocks if b.is_logits}

    assert logits_of("eager") == logits_of("sdpa")
    batch = 2
    assert logits_of("eager") == {(batch, length, length), (batch * length, length)}


def test_the_peak_s_table_puts_scores_among_activations():
    length = SIZES["vocab_size"]
    config = tiny_config("llama", max_position_embeddings=length)
    timeline = traced(config, attention="eager", max_length=length).timeline
    heads = SIZES["num_attention_heads"]
    kept = [
        category_of(block)
        for block in timeline.blocks
        if block.shape == (2, heads, length, length) and block.category is not None
    ]
    assert kept
    assert MemoryCategory.LOGITS_AND_LOSS not in kept
