"""What a trace says of where its allocations come from, and that asking changes nothing."""

from __future__ import annotations

import contextlib

import pytest
from estimate_samples import configuration, tiny_config

from tuner.core.records import MemoryCategory
from tuner.core.units import MIB
from tuner.cost.allocator import round_size
from tuner.cost.memory import live_at_peak, peak_memory
from tuner.cost.operators.timeline import Block
from tuner.predict.tracing import trace as trace_module
from tuner.predict.tracing.trace import Trace, trace
from tuner.predict.training import get_workload

VARIANTS = [
    {},
    {"gradient_checkpointing": True, "precision": "nf4", "optimizer": "paged_adamw_8bit"},
    {"lora_rank": 0, "grad_accum": 1},
]


def named(**values: object) -> Trace:
    return trace(
        get_workload("causal_lm"),
        tiny_config("gemma3"),
        configuration(**values),
        compute_capability=(8, 0),
    )


@pytest.mark.parametrize("values", VARIANTS, ids=str)
def test_naming_modules_changes_no_byte(monkeypatch, values):
    places = named(**values)
    assert any("." in block.place for block in places.timeline.blocks)
    nothing = contextlib.nullcontext()
    monkeypatch.setattr(trace_module, "named_modules", lambda recorder, model: nothing)
    plain = named(**values)
    assert plain.timeline.events == places.timeline.events
    assert [b.size_bytes for b in plain.timeline.blocks] == [
        b.size_bytes for b in places.timeline.blocks
    ]


@pytest.mark.parametrize("values", VARIANTS, ids=str)
def test_blocks_at_the_peak_are_all_that_is_allocated_then(values):
    timeline = named(**values).timeline
    least = sum(round_size(block.size_bytes) for block in live_at_peak(timeline))
    # What the allocator hands out whole, up to 1 MiB more than asked for, is counted beside it.
    peak = peak_memory(timeline, context_bytes=0).peak_allocated_bytes
    assert least <= peak <= least + len(timeline.blocks) * MIB
    assert not any(block.paged for block in live_at_peak(timeline))


def find(blocks: list[Block], **wanted: object) -> list[Block]:
    return [b for b in blocks if all(getattr(b, k) == v for k, v in wanted.items())]


def test_blocks_say_parameter_module_shape_and_operator():
    blocks = named(gradient_checkpointing=True).timeline.blocks
    embedding = "base_model.model.model.embed_tokens.weight"
    weights = find(blocks, place=embedding, category=MemoryCategory.WEIGHTS)
    assert [b.shape for b in weights] == [(320, 64)]
    gradients = find(blocks, category=MemoryCategory.GRADIENTS)
    assert gradients
    assert all(".lora_" in b.place for b in gradients)
    hidden = find(blocks, place="base_model.model.model.layers.1.mlp.act_fn", made_by="aten::gelu")
    assert {b.shape for b in hidden} == {(2, 32, 160)}
    # Forward of both steps, and their recomputation in the backward pass.
    assert {str(b.born_phase) for b in hidden} == {"forward", "backward"}


def test_weights_that_preparation_widens_keep_their_name():
    blocks = named(precision="nf4").timeline.blocks
    wide = [b for b in blocks if str(b.dtype) == "torch.float32" and b.shape == (320, 64)]
    assert [b.place for b in wide if b.died_event < 0] == [
        "base_model.model.model.embed_tokens.weight"
    ]
