"""Pairs of a model and a method, with images too: the trace and the emulator count alike."""

from __future__ import annotations

import pytest
from emulating import needs_emulator

from benchmarks.emulated import compare
from benchmarks.emulated_cases import Case

SIZES = {"micro_batch": 2, "max_length": 256, "grad_accum": 2, "lora_rank": 16}
PAIRS = {
    "olmo-2-7b": {"precision": "fp16", "mixed_precision": "fp16", "loss": "chunked"},
    "granite-3.1-2b": {"precision": "nf4", "use_reentrant": True, "optimizer": "lion_8bit"},
    "lfm2-1.2b": {"precision": "int8", "adapter": "rslora", "gradient_checkpointing": False},
    "qwen2.5-vl-3b": {"images": 1, "image_size": 224, "training_loop": "loop"},
    "qwen2.5-0.5b": {"num_labels": 3, "lora_rank": 0},
    "medgemma-4b": {"images": 1, "max_length": 512, "precision": "nf4"},
}


@needs_emulator
@pytest.mark.parametrize("model", PAIRS)
def test_trace_and_emulator_agree(model, tmp_path):
    settings = {**SIZES, **PAIRS[model]}
    answer = compare(Case(model, "a100_80gb", model=model, settings=settings), 2, tmp_path)
    assert not answer.failure
    found = {pair.name: pair for pair in answer.pairs}
    for name in ("allocated", "loaded", "forward", "backward", "optimizer"):
        assert not found[name].differs, found[name]
