"""Traces of whole training steps: the same each time, complete, and labelled correctly."""

from collections import Counter

import pytest
from estimate_samples import SEVEN_LINEARS, tiny_config, traced

from tuner.core.records import MemoryCategory, Phase
from tuner.cost.memory import Course, peak_memory
from tuner.predict.tracing import recorder

VARIANTS = [
    {},
    {"gradient_checkpointing": True, "lora_dropout": 0.1},
    {"attention": "eager", "lora_dropout": 0.05},
    {"precision": "nf4", "mixed_precision": "bf16", "gradient_checkpointing": True},
    {"precision": "int8", "gradient_checkpointing": True, "optimizer": "adamw_8bit"},
    {"precision": "fp32", "mixed_precision": "fp16", "lora_rank": 0},
    {"optimizer": "paged_adamw_8bit", "training_loop": "loop", "grad_accum": 1},
]
MODELS = ["llama", "qwen2", "qwen3", "gemma3"]
# Every variant with the model that has most kinds of layers, and each model with two variants.
PAIRS = [("gemma3", values) for values in VARIANTS]
PAIRS += [(model, VARIANTS[index]) for model in MODELS[:-1] for index in (1, 3)]


def label_of(values) -> str:
    if isinstance(values, str):
        return values
    return ",".join(f"{key}={value}" for key, value in values.items()) or "base"


def live_after(trace, event: int) -> list:
    """The blocks that are alive once `event` events have happened."""
    return [
        block
        for block in trace.timeline.blocks
        if block.born_event < event and not 0 <= block.died_event < event
    ]


def live_bytes(trace, category: MemoryCategory) -> int:
    """Bytes labelled `category` that are alive at the end of the trace."""
    return sum(
        block.size_bytes
        for block in live_after(trace, len(trace.timeline.events))
        if block.category is category
    )


def executed(trace) -> Counter:
    """How often each operator ran on what, by its phase."""
    timeline = trace.timeline
    return Counter(
        (timeline.works[op.work], timeline.marks[op.mark].phase, op.recompute)
        for op in timeline.ops
    )


# -- the memo of layouts --------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.parametrize("values", VARIANTS, ids=label_of)
def test_remembered_layouts_give_the_same_timeline_as_execution(values, monkeypatch):
    remembered = traced("gemma3", **values)
    monkeypatch.setattr(recorder, "signature_of", lambda *_: None)
    executed_each = traced("gemma3", **values)
    assert remembered.timeline.blocks == executed_each.timeline.blocks
    assert remembered.timeline.events == executed_each.timeline.events
    assert remembered.timeline.marks == executed_each.timeline.marks
    assert executed(remembered) == executed(executed_each)


# -- what lives how long --------------------------------------------------------------------


@pytest.mark.parametrize(("model", "values"), PAIRS, ids=label_of)
def test_a_step_leaves_nothing_behind_but_optimizer_state(model, values):
    """No tensor of a step outlives it: the second ends with what the first ended with."""
    trace = traced(model, **values)
    marks = trace.timeline.marks
    second_step = next(mark.event for mark in marks if mark.step == 1)
    first_forward = next(mark.event for mark in marks if mark.phase is Phase.FORWARD)
    loaded = live_after(trace, first_forward)
    after_first = live_after(trace, second_step)
    after_second = live_after(trace, len(trace.timeline.events))

    def sizes(blocks):
        return Counter((block.category, block.size_bytes, block.paged) for block in blocks)

    assert sizes(after_first) == sizes(after_second)
    expected = {MemoryCategory.OPTIMIZER_STATE, MemoryCategory.CONTEXT_AND_WORKSPACE}
    added = sizes(after_second) - sizes(loaded)
    left = sum(
        size_bytes * count
        for (category, size_bytes, _), count in added.items()
        if category not in expected
    )
    outputs = 0
    if values.get("training_loop") == "loop":  # the last outputs: fp32 loss and bf16 logits
        outputs = 4 + 2 * 2 * 32 * 320
    # bitsandbytes converts the biases of its layers once, to the type of their first input.
    biases = 2 * 2 * (64 + 32 + 32) if (model, values.get("precision")) == ("qwen2", "nf4") else 0
    assert left == outputs + biases


@pytest.mark.parametrize("values", [VARIANTS[3], VARIANTS[6]], ids=label_of)
def test_events_are_consistent(values):
    timeline = traced("llama", **values).timeline
    alive = set()
    for position, (index, sign) in enumerate(timeline.events):
        block = timeline.blocks[index]
        if sign > 0:
            assert index not in alive
            assert block.born_event == position
            alive.add(index)
        else:
            assert block.died_event == position
            alive.remove(index)
    assert alive == {i for i, block in enumerate(timeline.blocks) if block.died_event < 0}
    assert list(timeline.marks) == sorted(timeline.marks, key=lambda mark: mark.event)
    assert all(0 <= op.work < len(timeline.works) for op in timeline.ops)


def test_marks_tell_the_story_of_two_steps():
    accumulating = [(m.phase, m.step, m.micro_step) for m in traced(grad_accum=4).timeline.marks]
    assert accumulating[-8:] == [
        (Phase.FORWARD, 0, 0),
        (Phase.BACKWARD, 0, 0),
        (Phase.OPTIMIZER, 0, 1),
        (Phase.FORWARD, 1, 0),
        (Phase.BACKWARD, 1, 0),
        (Phase.FORWARD, 1, 1),
        (Phase.BACKWARD, 1, 1),
        (Phase.OPTIMIZER, 1, 2),
    ]
    single = traced(grad_accum=1)
    assert single.micro_steps == 1
    assert [m.phase for m in single.timeline.marks[-3:]] == [
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
    ]


def test_recomputation_is_marked_and_happens_once_a_layer():
    plain, checkpointed = traced(), traced(gradient_checkpointing=True)
    assert not any(op.recompute for op in plain.timeline.ops)
    again = [op for op in checkpointed.timeline.ops if op.recompute]
    assert {checkpointed.timeline.marks[op.mark].phase for op in again} == {Phase.BACKWARD}

    def attentions(trace, *, recompute):
        return sum(
            trace.timeline.works[op.work].name == "_scaled_dot_product_flash_attention"
            for op in trace.timeline.ops
            if op.recompute is recompute
        )

    assert attentions(plain, recompute=False) == 6  # two layers, three micro-steps
    assert attentions(checkpointed, recompute=True) == 6


# -- counts and sizes that are known in advance ---------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_trainable_parameters_are_those_of_peft(model):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(tiny_config(model))
    total = sum(p.numel() for p in base.parameters())
    config = LoraConfig(r=24, target_modules=list(SEVEN_LINEARS), task_type="CAUSAL_LM")
    trainable, total_with_adapters = get_peft_model(base, config).get_nb_trainable_parameters()
    trace = traced(model, lora_rank=24)
    assert trace.trainable_params == trainable
    assert trace.total_params == total_with_adapters == total + trainable


def test_packed_weights_count_as_the_weights_that_they_stand_for():
    assert traced(precision="nf4").total_params == traced(precision="bf16").total_params
    assert traced(precision="int8").total_params == traced(precision="bf16").total_params


def at_optimizer(trace) -> dict[MemoryCategory, int]:
    """Bytes by category when the last optimizer step begins: all gradients exist."""
    sizes: Counter = Counter()
    for block in live_after(trace, trace.timeline.marks[-1].event):
        sizes[block.category] += block.size_bytes
    return sizes


@pytest.mark.parametrize("precision", ["bf16", "fp32", "nf4"])
def test_adapters_and_gradients_are_fp32(precision):
    trace = traced(precision=precision)
    sizes = at_optimizer(trace)
    assert sizes[MemoryCategory.ADAPTERS] == 4 * trace.trainable_params
    assert sizes[MemoryCategory.GRADIENTS] == 4 * trace.trainable_params


def test_gradients_of_full_fine_tuning_have_the_precision_of_the_weights():
    trace = traced(lora_rank=0, precision="bf16")
    assert at_optimizer(trace)[MemoryCategory.GRADIENTS] == 2 * trace.trainable_params


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
def test_adamw_keeps_two_fp32_values_a_parameter(optimizer):
    trace = traced(optimizer=optimizer)
    counters = 4 * 2 * 14 if optimizer == "adamw_torch_fused" else 0  # its steps are on the GPU
    state = live_bytes(trace, MemoryCategory.OPTIMIZER_STATE)
    assert state == 8 * trace.trainable_params + counters


# bitsandbytes keeps state in fp32 below 4096 values a tensor, and pages none below 100,000.
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "head_dim": 128}


def test_8bit_adam_keeps_two_bytes_a_parameter_and_their_scales():
    trace = traced(tiny_config(**WIDE), optimizer="adamw_8bit", lora_rank=512)
    state = live_bytes(trace, MemoryCategory.OPTIMIZER_STATE)
    # Two fp32 scales a block of 256 values, and a table of 256 fp32 codes a state and tensor.
    codes = 14 * 2 * 256 * 4
    assert state <= 2 * trace.trainable_params * (1 + 4 / 256) + codes
    assert state >= 2 * trace.trainable_params * (1 + 4 / 256)


@pytest.mark.parametrize("optimizer", ["paged_adamw_8bit", "paged_adamw_32bit"])
def test_paged_state_is_counted_apart(optimizer):
    paged = traced(tiny_config(**WIDE), optimizer=optimizer, lora_rank=512)
    memory = peak_memory(Course.of(paged.timeline), context_bytes=0)
    per_parameter = 2 if optimizer == "paged_adamw_8bit" else 8
    assert memory.paged_bytes == pytest.approx(per_parameter * paged.trainable_params, rel=0.02)
    resident = traced(tiny_config(**WIDE), optimizer="adamw_8bit", lora_rank=512)
    in_memory = peak_memory(Course.of(resident.timeline), context_bytes=0)
    assert in_memory.paged_bytes == 0
    if optimizer == "paged_adamw_8bit":
        state = in_memory.breakdown["optimizer_state"] - memory.breakdown["optimizer_state"]
        assert state == pytest.approx(memory.paged_bytes, rel=0.01)


def weight_bytes(trace) -> int:
    """Bytes that loading leaves, adapters apart."""
    first_forward = next(m.event for m in trace.timeline.marks if m.phase is Phase.FORWARD)
    loaded = live_after(trace, first_forward)
    return sum(b.size_bytes for b in loaded if b.category is not MemoryCategory.ADAPTERS)


LINEARS = 512 * (512 + 512 + 256 + 256) + 3 * 512 * 1024  # q, o, k, v; the MLP
ROWS = 512 + 512 + 256 + 256 + 1024 + 1024 + 512
OTHERS = 2 * 320 * 512 + 3 * 512  # embedding and head, norms


def test_nf4_weights_take_half_a_byte_and_scales():
    trace = traced(tiny_config(**WIDE), precision="nf4")
    scales = LINEARS // 64 + LINEARS // 64 // 256 * 4  # one byte a block, fp32 a block of those
    tables = 7 * (16 + 256 + 1) * 4  # two code tables and an offset a layer
    frequencies = 128 // 2 * 4 * 2
    # k-bit preparation widens everything that is not quantised to fp32.
    assert weight_bytes(trace) == LINEARS // 2 + scales + tables + 4 * OTHERS + frequencies


def test_int8_weights_take_a_byte_and_a_scale_a_row():
    trace = traced(tiny_config(**WIDE), precision="int8")
    frequencies = 128 // 2 * 4 * 2
    assert weight_bytes(trace) == LINEARS + 4 * ROWS + 4 * OTHERS + frequencies


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_outlives_its_forward(checkpointing):
    timeline = traced(gradient_checkpointing=checkpointing).timeline
    ends = {
        mark: following.event
        for mark, following in zip(timeline.marks, timeline.marks[1:], strict=False)
        if mark.phase is Phase.FORWARD
    }
    kept, gone = [], []
    for mark, end in ends.items():
        born_here = [b for b in timeline.blocks if mark.event <= b.born_event < end]
        kept += [b.category for b in born_here if not 0 <= b.died_event < end]
        gone += [b.category for b in born_here if 0 <= b.died_event < end]
    workspace = MemoryCategory.CONTEXT_AND_WORKSPACE
    assert set(kept) - {workspace} == {MemoryCategory.ACTIVATIONS}
    assert set(gone) <= {None, MemoryCategory.TEMPORARY}
    assert len(kept) > 20
    assert len(gone) > 20
