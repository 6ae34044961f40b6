"""Trace and emulator count the same memory of the same training step, with images too."""

from __future__ import annotations

import pytest
from emulating import needs_emulator

from benchmarks.emulated import LEAST_BYTES, compare
from benchmarks.emulated_cases import Case, all_cases

TINY = "tiny-llama-3m"
LARGE = {"micro_batch": 8, "max_length": 512, "lora_rank": 16, "grad_accum": 3}
SMALL = {"micro_batch": 2, "max_length": 256, "lora_rank": 16, "grad_accum": 2}
WHOLE = {**SMALL, "lora_rank": 0}
"""Full fine-tuning, with the optimizers that transformers' Trainer has."""
BF16 = {"precision": "bf16", "mixed_precision": "no"}
FP32 = {"precision": "fp32", "mixed_precision": "bf16"}
"""Master weights in fp32 under autocast, as Trainer(bf16=True) trains them."""

CASES = {
    "quantised": (
        TINY,
        {
            **LARGE,
            "precision": "nf4",
            "optimizer": "paged_adamw_8bit",
            "gradient_checkpointing": True,
        },
    ),
    "eager": (
        TINY,
        {**LARGE, "precision": "bf16", "attention": "eager", "gradient_checkpointing": False},
    ),
    "chunked": (
        "olmo-2-7b",
        {**SMALL, "precision": "fp16", "mixed_precision": "fp16", "loss": "chunked"},
    ),
    "reentrant": (
        "granite-3.1-2b",
        {**SMALL, "precision": "nf4", "use_reentrant": True, "optimizer": "lion_8bit"},
    ),
    "rslora": (
        "lfm2-1.2b",
        {**SMALL, "precision": "int8", "adapter": "rslora", "gradient_checkpointing": False},
    ),
    "dora": ("qwen2.5-0.5b", {**SMALL, "precision": "nf4", "adapter": "dora"}),
    "loop": (
        "qwen2.5-vl-3b",
        {**SMALL, "images": 1, "image_size": 224, "training_loop": "loop"},
    ),
    "images": ("medgemma-4b", {**SMALL, "images": 1, "max_length": 512, "precision": "nf4"}),
    "labels": ("qwen2.5-0.5b", {**WHOLE, "num_labels": 3}),
    "adamw": ("gemma-3-1b", {**WHOLE, **FP32, "optimizer": "adamw_torch"}),
    "paged lion": ("qwen2.5-0.5b", {**WHOLE, **BF16, "optimizer": "paged_lion_8bit"}),
    "adafactor": ("gemma-3-1b", {**WHOLE, **BF16, "optimizer": "adafactor"}),
}


@needs_emulator
@pytest.mark.parametrize(
    "name",
    [
        c if c in ("quantised", "labels") else pytest.param(c, marks=pytest.mark.proof)
        for c in CASES
    ],
)
def test_trace_and_emulator_agree(name, tmp_path):
    model, settings = CASES[name]
    layers = None if model == TINY else 2
    answer = compare(Case(name, "a100_80gb", model=model, settings=settings), layers, tmp_path)
    assert not answer.failure
    found = {pair.name: pair for pair in answer.pairs}
    assert found["allocated"].emulated > 20 * LEAST_BYTES
    for number in ("allocated", "loaded", "forward", "backward", "optimizer"):
        assert not found[number].differs, found[number]


def test_the_cases_are_configurations_of_their_spaces(tmp_path):
    for case in all_cases():
        space, configuration = case.opened(3, tmp_path)
        assert space.predictable
        assert configuration
