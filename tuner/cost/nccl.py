"""Device memory of NCCL: the buffers of its connections, counted from its source (2.30).

Each GPU has a connection to its neighbours in every channel (src/transport/p2p.cc). Rings and trees
use the same channels, and both go through neighbours of a chain, so that a GPU has two neighbours,
or one of two. GPUs behind an NVLink switch that can add up have buffers for that besides, one set
for each GPU of the machine (src/transport/nvls.cc).

What kernels take is not counted, nor buffers of sends and receives, nor those between machines.
"""

from __future__ import annotations

from tuner.core.gpu import Gpu
from tuner.core.units import MIB

CONNECTION_BYTES = 12 * MIB
"""10 MiB to receive: 512 KiB, 4,800 KiB and 4 MiB (NCCL_BUFFSIZE) for its three protocols, in whole
2 MiB; and 2 MiB to send. A log of NCCL has these sizes (github.com/NVIDIA/nccl/issues/1685)."""

PCIE_CHANNELS = 2
"""Channels over PCI Express: one ring, used twice (github.com/NVIDIA/nccl-tests/issues/307, eight
RTX 4090). Cards that cannot reach each other have these buffers on the host."""

_PCIE_BYTES_PER_S = 63e9
"""What 16 lanes of PCI Express 5.0 send in one direction: faster links are NVLink."""

SWITCH_BYTES = 2 * 8 * 128 * 1024
"""Of a channel and GPU behind a switch: two buffers of 8 steps (NCCL_NVLS_CHUNKSIZE)."""

SWITCH_CHANNELS = {9: 16, 10: 24}
"""Channels through a switch by the first number of the compute capability (NVLS_NCHANNELS)."""


def nccl_bytes(gpu: Gpu, ranks: int) -> int | None:
    """Device memory of one communicator over `ranks` GPUs of one machine, on each of them.

    None where nothing says how many channels there are.
    """
    if ranks == 1:
        return 0
    if gpu.link_bytes_per_s is None or not any(gpu.compute_capability):
        return None
    neighbours = min(2, ranks - 1)
    if gpu.link_bytes_per_s <= _PCIE_BYTES_PER_S:
        return PCIE_CHANNELS * neighbours * CONNECTION_BYTES
    if gpu.nccl_channels is None:
        return None
    switch = SWITCH_CHANNELS.get(gpu.compute_capability[0], 0) * ranks * SWITCH_BYTES
    return gpu.nccl_channels * neighbours * CONNECTION_BYTES + switch
