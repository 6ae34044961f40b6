"""Mechanisms that the published runs showed, each checked alone and against one of them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.accuracy.attention import register  # noqa: E402
from benchmarks.accuracy.chunked_loss import ChunkedLossWorkload  # noqa: E402
from benchmarks.accuracy.harnesses import Case, express  # noqa: E402
from benchmarks.accuracy.rows import read_rows  # noqa: E402
from tuner.core.records import Configuration, Memory  # noqa: E402
from tuner.cost.allocator import replay  # noqa: E402
from tuner.cost.memory import peak_memory  # noqa: E402
from tuner.predict.tracing.trace import Trace, trace  # noqa: E402
from tuner.predict.training import get_workload  # noqa: E402
from tuner.space.models.catalogue import resolve_config  # noqa: E402

BATCH, LENGTH = 4, 512
TURING, AMPERE = (7, 5), (8, 0)


def _trace(
    capability: tuple[int, int],
    layers: int = 2,
    wrap: Any = lambda workload: workload,
    **settings: Any,
) -> Trace:
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
    workload = wrap(get_workload("causal_lm"))
    return trace(workload, config, configuration, compute_capability=capability)


def _memory(capability: tuple[int, int], **settings: Any) -> Memory:
    return peak_memory(_trace(capability, **settings).timeline, context_bytes=0)


def _logits_bytes(element_size: int) -> int:
    return BATCH * LENGTH * int(resolve_config("smollm2-135m").vocab_size) * element_size


def test_a_hand_written_loop_holds_the_logits_in_backward() -> None:
    trainer = _memory(AMPERE).phase_peak_bytes["backward"]
    function = _memory(AMPERE, training_loop="function").phase_peak_bytes["backward"]
    assert function - trainer == pytest.approx(_logits_bytes(2), rel=0.01)


def test_the_loss_of_older_transformers_copies_the_shifted_logits() -> None:
    now = _memory(AMPERE).phase_peak_bytes["forward"]
    older = _memory(AMPERE, loss="transformers_4_46").phase_peak_bytes["forward"]
    assert older - now == pytest.approx(_logits_bytes(4), rel=0.01)


def test_a_loss_in_chunks_has_no_logits_of_the_whole_batch() -> None:
    whole = _trace(AMPERE).timeline
    chunked = _trace(AMPERE, wrap=ChunkedLossWorkload).timeline
    # 49152 entries over a width of 576 make 86 parts of 24 tokens, rounded up to 32.
    shapes = {work.shape for work in chunked.works}
    assert (1, 32, 49152, 576) in shapes
    largest = [max(max(w.tensor_bytes, default=0) for w in t.works) for t in (whole, chunked)]
    assert largest[0] >= _logits_bytes(4)
    assert largest[1] < _logits_bytes(2)
    # The same products, and one token of each sequence less: the last has nothing to predict.
    flops = [sum(t.works[op.work].flops for op in t.ops) for t in (whole, chunked)]
    assert flops[1] == pytest.approx(flops[0], rel=0.01)


def test_softmax_backward_has_a_buffer_of_the_size_of_the_scores() -> None:
    works = _trace(TURING, attention="eager").timeline.works
    backward = [work for work in works if work.name == "_softmax_backward_data"]
    heads = resolve_config("smollm2-135m").num_attention_heads
    scores_fp32 = BATCH * heads * LENGTH * LENGTH * 4
    assert [work.workspace_bytes for work in backward] == [(scores_fp32,)]


def test_grouped_queries_run_without_a_fused_kernel_before_ampere() -> None:
    names = {work.name for work in _trace(TURING, precision="fp16").timeline.works}
    assert "bmm" in names
    assert not any("efficient" in name for name in names)
    names = {work.name for work in _trace(AMPERE).timeline.works}
    assert any("flash" in name for name in names)


def test_flash_attention_2_can_be_traced_without_the_package() -> None:
    names = {work.name for work in _trace(AMPERE, attention="flash_attention_2").timeline.works}
    assert any("flash" in name for name in names)


@pytest.mark.parametrize(("number", "tolerance"), [(25, 0.001), (57, 0.001)])
def test_published_peaks(number: int, tolerance: float) -> None:
    register()
    case = express(read_rows()[number])
    assert isinstance(case, Case)
    assert case.measured.allocated is not None
    traced = trace(
        get_workload("causal_lm"),
        resolve_config(case.model),
        case.configuration,
        compute_capability=TURING if case.gpu == "t4" else (8, 9),
    )
    blocks = traced.timeline.blocks
    sizes = [0 if block.paged else block.size_bytes for block in blocks]
    allocated = replay(traced.timeline.events, sizes).peak_allocated_bytes
    assert allocated == pytest.approx(case.measured.allocated, rel=tolerance)
