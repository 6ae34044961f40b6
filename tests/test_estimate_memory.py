"""From a timeline to peak memory: sums that are exact, and the numbers of published runs."""

import pytest
from estimate_samples import BASE, SEVEN_LINEARS, tiny_config, traced
from hypothesis import given
from hypothesis import strategies as st

from tuner.core.records import Configuration, MemoryCategory, Phase
from tuner.core.units import GIB, KIB, MIB
from tuner.cost.allocator import AllocatorSettings, replay, round_size
from tuner.cost.memory import Course, peak_memory
from tuner.cost.operators.timeline import Block, Mark, Timeline
from tuner.predict.tracing.trace import trace
from tuner.predict.training import get_workload
from tuner.space.models.catalogue import resolve_config

CONTEXT = 300 * MIB
CUBLAS_WORKSPACE = 4096 * 2 * KIB + 16 * 8 * KIB  # ":4096:2:16:8", sizes in KiB (CUDABlas.cpp)
VARIANTS = [
    {},
    {"precision": "nf4", "gradient_checkpointing": True, "optimizer": "paged_adamw_8bit"},
    {"precision": "int8", "mixed_precision": "fp16", "attention": "eager"},
    {"lora_rank": 0, "precision": "fp32", "grad_accum": 1},
]


@pytest.mark.parametrize("values", VARIANTS, ids=str)
@pytest.mark.parametrize(
    "settings", [None, AllocatorSettings(expandable_segments=True)], ids=["default", "expandable"]
)
def test_breakdown_adds_up_to_device_memory(values, settings):
    timeline = traced("gemma3", **values).timeline
    memory = peak_memory(Course.of(timeline), context_bytes=CONTEXT, settings=settings)
    assert set(memory.breakdown) == {str(category) for category in MemoryCategory}
    assert sum(memory.breakdown.values()) == memory.device_bytes
    assert all(size >= 0 for size in memory.breakdown.values())
    assert memory.device_bytes == memory.peak_reserved_bytes + CONTEXT
    assert memory.peak_reserved_bytes >= memory.peak_allocated_bytes > memory.loaded_bytes
    assert memory.phase_peak_bytes[memory.peak_phase] == max(memory.phase_peak_bytes.values())


def test_reentrant_checkpoints_keep_what_int8_layers_save_out_of_memory():
    """`prepare_model_for_kbit_training` with its defaults turns these on.

    Each further layer then keeps its input only; the newer way keeps much more of int8 layers.
    """
    growth = {}
    for reentrant in (False, True):
        peaks = []
        for layers in (2, 3):
            values = {"precision": "int8", "gradient_checkpointing": True}
            values |= {"use_reentrant": reentrant, "micro_batch": 4, "max_length": 256}
            config = tiny_config("llama", num_hidden_layers=layers)
            memory = peak_memory(
                Course.of(traced(config, **values).timeline), context_bytes=CONTEXT
            )
            peaks.append(memory.phase_peak_bytes["backward"])
        growth[reentrant] = peaks[1] - peaks[0]
    assert growth[False] > 3 * growth[True] > 0


def made_up(*, sizes: list[int], events: list[tuple[int, int]], forward_at: int) -> Timeline:
    """A timeline of blocks without names: loaded up to `forward_at`, then one forward pass."""
    blocks = []
    for index, size in enumerate(sizes):
        died = events.index((index, -1)) if (index, -1) in events else -1
        born = events.index((index, +1))
        phase = Phase.LOAD if born < forward_at else Phase.FORWARD
        blocks.append(Block(size, phase, born, died))
    marks = [Mark(0, Phase.LOAD, 0, 0), Mark(forward_at, Phase.FORWARD, 0, 0)]
    return Timeline(blocks=blocks, events=events, marks=marks)


def test_peak_of_a_timeline_counted_by_hand():
    timeline = made_up(
        sizes=[12 * MIB, 30 * MIB, 20 * MIB, 1000],
        events=[(0, +1), (1, +1), (1, -1), (2, +1), (3, +1), (2, -1)],
        forward_at=1,
    )
    memory = peak_memory(Course.of(timeline), context_bytes=0)
    assert memory.peak_allocated_bytes == 42 * MIB
    assert memory.loaded_bytes == 12 * MIB
    # The 30 MiB segment is reused for 20 MiB; the small block takes a segment of 2 MiB.
    assert memory.peak_reserved_bytes == 44 * MIB
    assert memory.breakdown["weights"] == 12 * MIB
    assert memory.breakdown["temporary"] == 30 * MIB
    assert memory.breakdown["allocator_overhead"] == 2 * MIB
    assert memory.phase_peak_bytes["load"] == 12 * MIB
    assert memory.peak_phase == "forward"


@given(sizes=st.lists(st.integers(1, 50 * MIB), min_size=1, max_size=30), data=st.data())
def test_peak_is_the_largest_sum_of_rounded_live_blocks(sizes, data):
    deaths = data.draw(st.permutations(range(len(sizes))))
    events = [(index, +1) for index in range(len(sizes))] + [(index, -1) for index in deaths]
    timeline = made_up(sizes=sizes, events=events, forward_at=1)
    memory = peak_memory(Course.of(timeline), context_bytes=CONTEXT)
    least = sum(map(round_size, sizes))
    # What PyTorch hands out whole, up to 1 MiB more than asked for, may be counted or not.
    assert least <= memory.peak_allocated_bytes <= least + len(sizes) * MIB
    assert memory.peak_reserved_bytes == replay(events, sizes).peak_reserved_bytes
    assert sum(memory.breakdown.values()) == memory.device_bytes


def test_cublas_keeps_a_workspace_for_each_of_two_threads():
    timeline = traced().timeline
    kept = [b for b in timeline.blocks if b.category is MemoryCategory.CONTEXT_AND_WORKSPACE]
    assert [block.size_bytes for block in kept] == [CUBLAS_WORKSPACE] * 2
    assert [block.born_phase for block in kept] == [Phase.FORWARD, Phase.BACKWARD]
    hopper = traced(compute_capability=(9, 0)).timeline
    kept = [b for b in hopper.blocks if b.category is MemoryCategory.CONTEXT_AND_WORKSPACE]
    assert [block.size_bytes for block in kept] == [32 * MIB] * 2
    memory = peak_memory(Course.of(timeline), context_bytes=CONTEXT)
    assert memory.breakdown["context_and_workspace"] == CONTEXT + 2 * CUBLAS_WORKSPACE


def test_logits_are_told_from_other_activations():
    """The loss holds fp32 logits and their gradient over the whole vocabulary at the peak."""
    sizes = {"vocab_size": 32_000}
    memory = peak_memory(
        Course.of(traced(tiny_config(**sizes), max_length=128).timeline), context_bytes=0
    )
    logits = 4 * 2 * 128 * 32_000
    assert memory.breakdown["logits_and_loss"] >= 2 * logits
    assert memory.breakdown["logits_and_loss"] <= 4 * logits
    assert memory.breakdown["activations"] < logits


@pytest.mark.parametrize(
    "values", [{}, {"gradient_checkpointing": True, "precision": "nf4"}], ids=str
)
def test_a_packed_row_takes_what_its_samples_take_side_by_side(values):
    """With flash attention; only the position embeddings are as long as the row."""

    def peak(micro_batch, max_length):
        sizes = {"micro_batch": micro_batch, "max_length": max_length, "precision": "bf16"}
        found = traced("llama", attention="flash_attention_2", **{**sizes, **values})
        return peak_memory(Course.of(found.timeline), context_bytes=0).peak_allocated_bytes

    assert peak(1, 2048) == pytest.approx(peak(4, 512), rel=0.01)


# -- published runs -------------------------------------------------------------------------

MISTRAL = {
    **BASE,
    "grad_accum": 1,
    "max_length": 4096,
    "lora_rank": 16,
    "lora_alpha": 16,
    "lora_dropout": 0.1,
    "lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gradient_checkpointing": True,
}


def trace_full(model: str, capability: tuple[int, int], values: dict):
    return trace(
        get_workload("causal_lm"),
        resolve_config(model),
        Configuration(values),
        compute_capability=capability,
    )


@pytest.mark.proof
def test_mistral_7b_on_an_a100():
    """Measured max_memory_allocated of Mistral-7B-v0.1, LoRA, bf16, on an A100.

    foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv at 876e2ed,
    framework_config "none".
    """
    traced_ = trace_full("mistral-7b-v0.1", (8, 0), {**MISTRAL, "micro_batch": 8})
    memory = peak_memory(Course.of(traced_.timeline), context_bytes=0)
    assert memory.peak_allocated_bytes / GIB == pytest.approx(36.0821, rel=0.06)
    assert memory.peak_phase == "backward"


@pytest.mark.proof
def test_medgemma_27b_at_rank_128():
    values = {
        **BASE,
        "lora_rank": 128,
        "lora_targets": SEVEN_LINEARS,
        "precision": "nf4",
        "mixed_precision": "bf16",
        "gradient_checkpointing": True,
        "optimizer": "paged_adamw_8bit",
        "max_length": 1024,
    }
    traced_ = trace_full("medgemma-27b-text", (8, 6), values)
    assert traced_.trainable_params == 908_132_352
    assert traced_.total_params == 27_009_002_240 + 908_132_352
    memory = peak_memory(Course.of(traced_.timeline), context_bytes=0)
    # Adapters and their gradients are fp32; k-bit preparation widens the embedding.
    assert memory.breakdown["adapters"] == pytest.approx(4 * 908_132_352, rel=1e-3)
    embedding = 262_144 * 5376
    packed = (27_009_002_240 - embedding) * (0.5 + 1 / 64)
    assert memory.breakdown["weights"] == pytest.approx(packed + 4 * embedding, rel=0.01)
    assert memory.paged_bytes == pytest.approx(2 * 908_132_352, rel=0.01)
