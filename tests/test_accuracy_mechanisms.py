"""Mechanisms that the published runs showed, each checked alone and against one of them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

torch = pytest.importorskip("torch")

from benchmarks.accuracy.attention import register  # noqa: E402
from benchmarks.accuracy.harnesses import Case, express  # noqa: E402
from benchmarks.accuracy.losses import register as register_losses  # noqa: E402
from benchmarks.accuracy.programs import Program  # noqa: E402
from benchmarks.accuracy.rows import read_rows  # noqa: E402
from benchmarks.accuracy.traces import MODELS  # noqa: E402
from tuner.core.records import Configuration, Memory  # noqa: E402
from tuner.cost.allocator import replay  # noqa: E402
from tuner.cost.memory import memory_history, peak_memory  # noqa: E402
from tuner.cost.operators.timeline import MASK  # noqa: E402
from tuner.predict.tracing.trace import Trace, trace  # noqa: E402
from tuner.predict.training import get_workload  # noqa: E402
from tuner.predict.training.losses import use_loss  # noqa: E402
from tuner.space.models.catalogue import get_entry, resolve_config  # noqa: E402

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


def _with(*ways: str) -> Any:
    return lambda workload: Program(workload, ways)


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
    chunked = _trace(AMPERE, wrap=_with("chunked_loss")).timeline
    # 49152 entries over a width of 576 make 86 parts of 24 tokens, rounded up to 32.
    shapes = {work.shape for work in chunked.works}
    assert (1, 32, 49152, 576) in shapes
    largest = [max(max(w.tensor_bytes, default=0) for w in t.works) for t in (whole, chunked)]
    assert largest[0] >= _logits_bytes(4)
    assert largest[1] < _logits_bytes(2)
    # The same products, and one token of each sequence less: the last has nothing to predict.
    flops = [sum(t.works[op.work].flops for op in t.ops) for t in (whole, chunked)]
    assert flops[1] == pytest.approx(flops[0], rel=0.01)


def test_outputs_that_a_program_keeps_have_a_cache_if_it_does_not_switch_it_off() -> None:
    settings = {"gradient_checkpointing": False, "training_loop": "loop"}
    plain = memory_history(_trace(AMPERE, **settings).timeline).allocated[-1]
    wrap = _with("cache_in_outputs")
    cached = memory_history(_trace(AMPERE, wrap=wrap, **settings).timeline).allocated[-1]
    config, layers = resolve_config("smollm2-135m"), 2
    heads_bytes = config.num_key_value_heads * config.head_dim * 2
    assert cached - plain == pytest.approx(2 * layers * BATCH * LENGTH * heads_bytes, rel=0.01)


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


def test_a_trace_knows_which_attention_has_a_mask() -> None:
    register()

    def names(attention: str) -> set[str]:
        works = _trace(TURING, attention=attention).timeline.works
        return {work.name for work in works if work.kind == "attention"}

    plain = names("repeated_heads")
    assert all("efficient" in name for name in plain)
    assert len(plain) == 2  # forward and backward
    assert names("masked_heads") == {name + MASK for name in plain}


@pytest.mark.parametrize("loss", ["transformers_4_45", "unwidened"])
def test_losses_of_old_versions_come_to_the_same_loss(loss: str) -> None:
    from transformers import AutoModelForCausalLM

    register_losses()
    torch.manual_seed(0)
    config = resolve_config("tiny-llama-3m")
    model = AutoModelForCausalLM.from_config(config).train()
    tokens = torch.randint(0, config.vocab_size, (2, 24))
    labels = tokens.clone()
    labels[:, :5] = -100
    expected = model(input_ids=tokens, labels=labels).loss
    use_loss(model, loss, fused=False)
    found = model(input_ids=tokens, labels=labels).loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.fixture(scope="module")
def cases() -> dict[int, Case]:
    return {row.number: case for row in read_rows() if isinstance(case := express(row), Case)}


def test_every_row_is_expressed_or_has_a_reason(cases: dict[int, Case]) -> None:
    rows = read_rows()
    assert (len(rows), len(cases)) == (447, 311)
    reasons = [str(express(row)) for row in rows if row.number not in cases]
    assert all(len(reason) > 20 and not reason.startswith("no harness") for reason in reasons)
    # Each can be predicted offline, and of rows that differ in what was measured alike.
    own = yaml.safe_load(MODELS.read_text("utf-8"))
    assert {c.model for c in cases.values() if get_entry(c.model) is None} <= own.keys()
    assert cases[13].row.throughput != cases[14].row.throughput
    assert cases[13].configuration == cases[14].configuration


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (10, {"precision": "nf4", "double_quant": False, "attention": "repeated_heads"}),
        (52, {"gradient_checkpointing": False, "training_loop": "loop"}),
        (103, {"loss": "transformers_4_46", "mixed_precision": "no", "fused_loss": False}),
        (106, {"kbit_preparation": "trl", "mixed_precision": "bf16"}),
        (112, {"kbit_preparation": "none"}),
        (124, {"loss": "transformers_4_45", "fused_loss": True}),
        (128, {"loss": "transformers", "fused_loss": False}),
        (387, {"loss": "unwidened", "training_loop": "trainer", "compute_dtype": "fp32"}),
        (73, {"max_length": 210, "lora_rank": 1}),  # the mean length; the adapters are a way
        (170, {"modules_to_save": ("embed_tokens", "lm_head"), "use_reentrant": True}),
        (282, {"precision": "fp32", "max_grad_norm": 0}),  # Turing, code of 2019
        (302, {"precision": "tf32", "max_grad_norm": 1.0}),
        (422, {"precision": "fp32", "mixed_precision": "fp16"}),
    ],
)
def test_harnesses(cases: dict[int, Case], number: int, expected: dict[str, object]) -> None:
    configuration = cases[number].configuration
    assert {name: configuration[name] for name in expected} == expected


@pytest.mark.parametrize(("number", "tolerance"), [(25, 0.001), (57, 0.001)])
def test_published_peaks(cases: dict[int, Case], number: int, tolerance: float) -> None:
    register()
    case = cases[number]
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
