"""The kernels behind operators on CUDA and on a processor, which tensors without data don't show.

Decompositions spell out operators that allocate buffers on the way, as the sequence of
allocations of their implementation. Leaves describe single kernels: FLOPs, class, and the workspace
beside inputs and outputs. Importing this module registers the operators of bitsandbytes, without
touching a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tuner.core.meanwhile import import_bitsandbytes
from tuner.cost.operators.aten_kernels import (
    ATEN_DECOMPOSITIONS,
    ATEN_LEAVES,
    Kernels,
    LeafRule,
    fused_attention,
    safe_softmax,
)
from tuner.cost.operators.bnb_kernels import bnb_kernels, dequantize, gemm_4bit

import_bitsandbytes()


_OF_BITSANDBYTES = bnb_kernels()

CUDA_KERNELS = Kernels(
    {**_OF_BITSANDBYTES.decompositions, **ATEN_DECOMPOSITIONS},
    {**_OF_BITSANDBYTES.leaves, **ATEN_LEAVES},
)


_aten = torch.ops.aten
_bnb = torch.ops.bitsandbytes


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten._safe_softmax.default: safe_softmax,
}
if hasattr(_bnb, "gemm_4bit"):  # since 0.49
    # bitsandbytes' default backend, which its CPU backend leaves in place.
    DECOMPOSITIONS[_bnb.gemm_4bit.default] = gemm_4bit

LEAVES: dict[Any, LeafRule] = {
    _bnb.dequantize_4bit.default: dequantize,
    _bnb.dequantize_4bit.out: dequantize,
    _bnb.dequantize_blockwise.default: dequantize,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: fused_attention(
        causal_at=4, has_shape=False
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: fused_attention(
        causal_at=7, backward=True, has_shape=False
    ),
}

CPU_KERNELS = Kernels(DECOMPOSITIONS, LEAVES)
