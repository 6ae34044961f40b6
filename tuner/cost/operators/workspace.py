"""What CUDA libraries take from the caching allocator for themselves."""

from __future__ import annotations

from tuner.core.units import MIB

CUBLAS_WORKSPACE_BYTES = 4096 * 2 * 1024 + 16 * 8 * 1024
"""cuBLAS workspace of PyTorch before Hopper: ":4096:2:16:8" (CUDABlas.cpp)."""

CUBLAS_WORKSPACE_HOPPER_BYTES = 32 * MIB
"""The same from Hopper on: PyTorch 2.13 takes it on capabilities 9 to 12. Older versions, some of
which take the smaller one on 12.0, are not told apart."""


PROCESSOR = (0, 0)
"""Stands for a compute capability where the device is the processor: no NVIDIA GPU has it."""


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Workspace in bytes that one cuBLAS handle takes from the caching allocator and keeps.

    A processor has none.
    """
    if compute_capability == PROCESSOR:
        return 0
    if compute_capability >= (9, 0):
        return CUBLAS_WORKSPACE_HOPPER_BYTES
    return CUBLAS_WORKSPACE_BYTES
