"""Mechanisms of memory that published runs showed, each alone in a trace."""

from typing import Any

import pytest

from tuner.core.records import Configuration, Memory
from tuner.cost.memory import Course, peak_memory
from tuner.predict.tracing.trace import Trace, trace
from tuner.predict.training import get_workload
from tuner.space.models.catalogue import resolve_config

BATCH, LENGTH = 4, 512
TURING, AMPERE = (7, 5), (8, 0)


def _trace(capability: tuple[int, int], layers: int = 2, **settings: Any) -> Trace:
    config = resolve_config("smollm2-135m")
    config.num_hidden_layers = layers
    configuration = Configuration(
        {
            "micro_batch": BATCH,
            "max_length": LENGTH,
            "lora_rank": 8,
            "lora_targets": ("q_proj",),
            "precision": "bf16",
            "gradient_checkpointing": True,
            "optimizer": "adamw_torch",
            "attention": "sdpa",
            **settings,
        }
    )
    return trace(get_workload("causal_lm"), config, configuration, compute_capability=capability)


def _memory(capability: tuple[int, int], **settings: Any) -> Memory:
    return peak_memory(Course.of(_trace(capability, **settings).timeline), context_bytes=0)


def _logits_bytes(element_size: int) -> int:
    return BATCH * LENGTH * int(resolve_config("smollm2-135m").vocab_size) * element_size


def test_a_hand_written_loop_holds_the_logits_in_backward():
    trainer = _memory(AMPERE).phase_peak_bytes["backward"]
    function = _memory(AMPERE, training_loop="function").phase_peak_bytes["backward"]
    assert function - trainer == pytest.approx(_logits_bytes(2), rel=0.01)


def test_the_loss_of_older_transformers_copies_the_shifted_logits():
    now = _memory(AMPERE).phase_peak_bytes["forward"]
    older = _memory(AMPERE, loss="transformers_4_46").phase_peak_bytes["forward"]
    assert older - now == pytest.approx(_logits_bytes(4), rel=0.01)


def test_softmax_backward_has_a_buffer_of_the_size_of_the_scores():
    works = _trace(TURING, attention="eager").timeline.works
    backward = [work for work in works if work.name == "_softmax_backward_data"]
    heads = resolve_config("smollm2-135m").num_attention_heads
    scores_fp32 = BATCH * heads * LENGTH * LENGTH * 4
    assert [work.workspace_bytes for work in backward] == [(scores_fp32,)]


def test_grouped_queries_run_without_a_fused_kernel_before_ampere():
    names = {work.name for work in _trace(TURING, precision="fp16").timeline.works}
    assert "bmm" in names
    assert not any("efficient" in name for name in names)
    names = {work.name for work in _trace(AMPERE).timeline.works}
    assert any("flash" in name for name in names)


def test_flash_attention_2_can_be_traced_without_the_package():
    names = {work.name for work in _trace(AMPERE, attention="flash_attention_2").timeline.works}
    assert any("flash" in name for name in names)
