"""Buffers of NCCL as its source says, against out-of-memory messages, and sizes of contexts."""

from dataclasses import replace

import pytest

from tuner.core.records import Configuration
from tuner.core.units import GIB, MIB
from tuner.cost.library_memory import CONNECTION_BYTES, context_bytes, nccl_bytes
from tuner.space.gpus import get_gpu


def test_a_connection_has_the_buffers_of_three_protocols():
    """Sizes of NCCL 2.30: src/init.cc, DEFAULT_LL_BUFFSIZE and its neighbours."""
    low_latency, low_latency_128, simple = 8 * 512 * 8 * 16, 120 * 640 * 8 * 8, 4 * MIB
    receive = low_latency + low_latency_128 + simple
    assert -(-receive // (2 * MIB)) * 2 * MIB + 2 * MIB == CONNECTION_BYTES


@pytest.mark.parametrize(
    ("gpu", "ranks", "mib"),
    [
        ("h100_sxm", 1, 0),
        ("a100_80gb", 2, 24 * 12),
        ("a100_80gb", 8, 24 * 24),
        ("h100_sxm", 8, 24 * 24 + 16 * 8 * 2),
        ("rtx4090", 2, 24),
        ("rtx4090", 8, 48),
    ],
)
def test_each_channel_has_two_neighbours_and_a_switch(gpu, ranks, mib):
    assert nccl_bytes(get_gpu(gpu), ranks) == mib * MIB


@pytest.mark.parametrize(
    ("gpu", "precision", "mib"), [("h100_sxm", "bf16", 758), ("h100_sxm", "int8", 822)]
)
def test_a_context_has_the_size_that_was_read(gpu, precision, mib):
    assert context_bytes(get_gpu(gpu), Configuration({"precision": precision})) == mib * MIB
    eager = Configuration({"precision": precision, "attention": "eager"})
    without = 16 if gpu == "h100_sxm" else 0
    assert context_bytes(get_gpu(gpu), eager) == (mib - without) * MIB


def test_what_no_log_tells_is_unknown():
    h100 = get_gpu("h100_sxm")
    assert nccl_bytes(replace(h100, nccl_channels=None), 8) is None
    assert nccl_bytes(replace(h100, link_bytes_per_s=None), 8) is None
    assert nccl_bytes(get_gpu("b200"), 8) is None


@pytest.mark.parametrize(
    ("gpu", "ranks", "outside_gib"),
    [
        ("a100_80gb", 4, 38.82 - 35.59 - 2.14),  # the board with 40 GB
        ("l40s", 2, 44.34 - 43.42 - 419.37 / 1024),
        ("rtx3090", 8, 9.54 - 6.61 - 2.57),  # RTX 3080, the same generation
    ],
)
def test_published_messages_have_as_much_outside_of_pytorch(gpu, ranks, outside_gib):
    """In use by the process, less what PyTorch allocated and keeps; each has two decimals."""
    board = get_gpu(gpu)
    counted = board.context_bytes + (nccl_bytes(board, ranks) or 0)
    assert counted == pytest.approx(outside_gib * GIB, rel=0.06, abs=15 * MIB)
