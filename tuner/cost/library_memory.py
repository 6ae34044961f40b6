"""Device memory that CUDA libraries take for themselves: workspaces, kernels, buffers of NCCL.

NCCL's buffers are counted from its source (2.30): each GPU has a connection to its neighbours in
every channel (src/transport/p2p.cc). Rings and trees use the same channels, so that a GPU has two
neighbours, or one of two. GPUs behind an NVLink switch that can add up have one more set of buffers
for each GPU of the machine (src/transport/nvls.cc). Memory of kernels, of sends and receives, and
of connections between machines isn't counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.core.gpu import Gpu
from tuner.core.units import MIB

if TYPE_CHECKING:  # it imports msgspec, which an emulated program may not have
    from tuner.core.records import Configuration

CUBLAS_WORKSPACE_BYTES = 4096 * 2 * 1024 + 16 * 8 * 1024
"""cuBLAS workspace of PyTorch before Hopper: ":4096:2:16:8" (CUDABlas.cpp)."""

CUBLAS_WORKSPACE_HOPPER_BYTES = 32 * MIB
"""The workspace from Hopper on: PyTorch 2.13 takes it on capabilities 9 to 12. Older versions,
some of which take the smaller one on 12.0, are not told apart."""


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Workspace in bytes that one cuBLAS handle takes from the caching allocator and keeps."""
    if compute_capability >= (9, 0):
        return CUBLAS_WORKSPACE_HOPPER_BYTES
    return CUBLAS_WORKSPACE_BYTES


INT8_KERNELS_BYTES = {"h100_sxm": 64 * MIB}
"""Kernels that the int8 products of bitsandbytes add to the context, by GPU type: 822 MiB in place
of 758 (driver 580.159.04, CUDA 13.0, bitsandbytes 0.50.2). Other types are unknown."""


FUSED_ATTENTION_BYTES = {"h100_sxm": 16 * MIB}
"""The part of the context that eager attention is without, by GPU type: 742 MiB in place of 758."""


def context_bytes(gpu: Gpu, configuration: Configuration) -> int:
    """The context of a process that trains `configuration`, by the catalogue."""
    found = gpu.context_bytes
    if configuration["precision"] == "int8":
        found += INT8_KERNELS_BYTES.get(gpu.id, 0)
    if configuration.get("attention") == "eager":
        found -= FUSED_ATTENTION_BYTES.get(gpu.id, 0)
    return found


CONNECTION_BYTES = 12 * MIB
"""10 MiB to receive: 512 KiB, 4,800 KiB and 4 MiB (NCCL_BUFFSIZE) for its three protocols, in whole
2 MiB; and 2 MiB to send. A log of NCCL has these sizes (github.com/NVIDIA/nccl/issues/1685)."""

PCIE_CHANNELS = 2
"""Channels over PCI Express: one ring, used twice (github.com/NVIDIA/nccl-tests/issues/307, eight
RTX 4090). Cards that cannot reach each other have these buffers on the host."""

_PCIE_BYTES_PER_S = 63e9
"""Rate of 16 lanes of PCI Express 5.0 in one direction: faster links are NVLink."""

SWITCH_BYTES = 2 * 8 * 128 * 1024
"""Memory of a channel and GPU behind a switch: two buffers of 8 steps (NCCL_NVLS_CHUNKSIZE)."""

SWITCH_CHANNELS = {9: 16, 10: 24}
"""Channels through a switch by the first number of the compute capability (NVLS_NCHANNELS)."""


def nccl_bytes(gpu: Gpu, ranks: int) -> int | None:
    """Device memory of one communicator over `ranks` GPUs of one machine, on each of them.

    None where nothing says how many channels there are.
    """
    if ranks == 1:
        return 0
    if gpu.link_bytes_per_s is None:
        return None
    neighbours = min(2, ranks - 1)
    if gpu.link_bytes_per_s <= _PCIE_BYTES_PER_S:
        return PCIE_CHANNELS * neighbours * CONNECTION_BYTES
    if gpu.nccl_channels is None:
        return None
    switch = SWITCH_CHANNELS.get(gpu.compute_capability[0], 0) * ranks * SWITCH_BYTES
    return gpu.nccl_channels * neighbours * CONNECTION_BYTES + switch
