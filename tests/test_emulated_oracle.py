"""Trace and emulator count the same memory of the same training step."""

from __future__ import annotations

import pytest
from emulating import needs_emulator

from benchmarks.emulated import LEAST_BYTES, Pair, compare, page
from benchmarks.emulated_cases import Case, all_cases

LORA = {"micro_batch": 2, "max_length": 256, "grad_accum": 2, "lora_rank": 16}
TINY = {"micro_batch": 8, "max_length": 512, "grad_accum": 3, "lora_rank": 16}
FULL = {**LORA, "lora_rank": 0}
BF16 = {"precision": "bf16", "mixed_precision": "no"}
FP32 = {"precision": "fp32", "mixed_precision": "bf16"}
"""Master weights in fp32 under autocast, as Trainer(bf16=True) trains them."""


def case(name, model, settings, *, gpu="a100_80gb", layers=2):
    """A case with the number of layers that its model is cut to; all of a tiny model."""
    return pytest.param(Case(name, gpu, model=model, settings=settings), layers, id=name)


def tiny(name, gpu, **settings):
    return case(name, "tiny-llama-3m", {**TINY, **settings}, gpu=gpu, layers=None)


CASES = [
    tiny(
        "NF4, paged 8-bit optimizer",
        "a6000",
        precision="nf4",
        optimizer="paged_adamw_8bit",
        gradient_checkpointing=True,
    ),
    tiny(
        "eager, not checkpointed",
        "h100_sxm",
        precision="bf16",
        attention="eager",
        gradient_checkpointing=False,
    ),
    *(
        case(model, model, {**LORA, **settings})
        for model, settings in {
            "olmo-2-7b": {"precision": "fp16", "mixed_precision": "fp16", "loss": "chunked"},
            "granite-3.1-2b": {"precision": "nf4", "use_reentrant": True, "optimizer": "lion_8bit"},
            "lfm2-1.2b": {
                "precision": "int8",
                "adapter": "rslora",
                "gradient_checkpointing": False,
            },
            "qwen2.5-vl-3b": {"images": 1, "image_size": 224, "training_loop": "loop"},
            "qwen2.5-0.5b": {"num_labels": 3, "lora_rank": 0},
            "medgemma-4b": {"images": 1, "max_length": 512, "precision": "nf4"},
        }.items()
    ),
    case("dora", "qwen2.5-0.5b", {**LORA, "precision": "nf4", "adapter": "dora"}, layers=3),
    *(
        case(f"all weights, {name}", model, {**FULL, **dtypes, "optimizer": name}, layers=3)
        for model, dtypes, name in (
            ("gemma-3-1b", FP32, "adamw_torch"),
            ("qwen2.5-0.5b", BF16, "paged_lion_8bit"),
            ("gemma-3-1b", BF16, "adafactor"),
        )
    ),
]


@needs_emulator
@pytest.mark.parametrize(("case", "layers"), CASES)
def test_trace_and_emulator_agree(case, layers, tmp_path):
    answer = compare(case, layers, tmp_path)
    assert not answer.failure
    found = {pair.name: pair for pair in answer.pairs}
    assert found["allocated"].emulated > 20 * LEAST_BYTES
    for name in ("allocated", "loaded", "forward", "backward", "optimizer", "paged"):
        assert not found[name].differs, found[name]


def test_a_small_difference_is_none():
    assert not Pair("allocated", 1000, 1500).differs
    assert Pair("allocated", 1010 << 20, 1000 << 20).differs
    assert not Pair("allocated", 1004 << 20, 1000 << 20).differs


def test_a_case_that_fails_stays_in_the_table(tmp_path):
    case = Case("no such model", "a6000", model="no-such-model")
    answer = compare(case, None, tmp_path)
    assert "no-such-model" in answer.failure
    text = page([answer], None)
    assert "1 failed" in text
    assert "| no such model | a6000 | failed:" in text


def test_the_cases_are_configurations_of_their_spaces(tmp_path):
    for case in all_cases():
        space, configuration = case.opened(3, tmp_path)
        assert space.predictable
        assert configuration
