"""What the recorder notes of single operators: their FLOPs, and which results are logits."""

import pytest
import torch
from estimate_samples import SIZES, tiny_config, traced

from tuner.core.records import MemoryCategory
from tuner.core.units import MIB
from tuner.cost.memory import Course, category_of, memory_history
from tuner.cost.operators.timeline import Timeline
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


# -- storages that are emptied and filled again, as FSDP2 does with gathered weights ----------


def live_after(timeline: Timeline) -> list[int]:
    """MiB allocated after each event."""
    return [size // MIB for size in memory_history(Course.of(timeline)).allocated_bytes]


def test_an_emptied_storage_takes_nothing_until_it_grows_again():
    recorder = Recorder(workspace_bytes=0)
    with recorder:
        recorder.start()
        gathered = torch.empty(8 * MIB, dtype=torch.uint8, device="meta")
        view = gathered.view(-1, MIB)  # autograd would hold it so
        gathered.untyped_storage().resize_(0)
        other = torch.empty(4 * MIB, dtype=torch.uint8, device="meta")
        gathered.untyped_storage().resize_(8 * MIB)
        del gathered, view
    assert live_after(recorder.timeline) == [8, 0, 4, 12, 4]
    assert other.nbytes == 4 * MIB
    weights = [b for b in recorder.timeline.blocks if b.category is MemoryCategory.WEIGHTS]
    assert [b.size_bytes for b in weights] == [8 * MIB, 8 * MIB]
    assert weights[1].dtype is torch.uint8


def test_a_tensor_that_dies_empty_frees_nothing_twice():
    recorder = Recorder(workspace_bytes=0)
    with recorder:
        recorder.start()
        gathered = torch.empty(8 * MIB, dtype=torch.uint8, device="meta")
        gathered.untyped_storage().resize_(0)
        del gathered
    assert live_after(recorder.timeline) == [8, 0]


def test_a_label_outlives_a_change_of_size():
    recorder = Recorder(workspace_bytes=0)
    with recorder:
        recorder.start()
        tensor = torch.empty(2 * MIB, dtype=torch.uint8, device="meta")
        recorder.label(tensor, MemoryCategory.GRADIENTS)
        tensor.untyped_storage().resize_(6 * MIB)
    last = recorder.timeline.blocks[-1]
    assert (last.size_bytes, last.category) == (6 * MIB, MemoryCategory.GRADIENTS)


def test_sizes_are_followed_while_it_records_only():
    before = torch.UntypedStorage.resize_
    recorder = Recorder(workspace_bytes=0)
    with recorder:
        recorder.start()
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before
