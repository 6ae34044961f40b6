"""Storages that are emptied and filled again, as FSDP2 does with gathered weights."""

from __future__ import annotations

import torch

from tuner.core.records import MemoryCategory
from tuner.core.units import MIB
from tuner.cost.memory import Course, memory_history
from tuner.cost.operators.timeline import Timeline
from tuner.predict.tracing.recorder import Recorder


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
