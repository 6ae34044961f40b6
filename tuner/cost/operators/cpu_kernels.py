"""What kernels of a processor do that tensors without data do not show; see `kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tuner.cost.operators import bnb_operators  # noqa: F401  (registers them)
from tuner.cost.operators.aten_kernels import safe_softmax
from tuner.cost.operators.attention_kernels import attention_flops
from tuner.cost.operators.bnb_kernels import dequantize, gemm_4bit
from tuner.cost.operators.leaf_kernels import Kernels, LeafKernel

_aten = torch.ops.aten
_bnb = torch.ops.bitsandbytes


def _attention_forward(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    query, key, value = args[:3]
    causal = bool(args[4]) if len(args) > 4 else False
    flops = attention_flops(query.shape, key.shape, value.shape, causal=causal)
    return LeafKernel("attention", flops=flops)


def _attention_backward(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    _, query, key, value = args[:4]
    causal = bool(args[7]) if len(args) > 7 else False
    flops = attention_flops(query.shape, key.shape, value.shape, causal=causal) * 5 // 2
    return LeafKernel("attention", flops=flops)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    # bitsandbytes' default backend, which its CPU backend leaves in place.
    _bnb.gemm_4bit.default: gemm_4bit,
    _aten._safe_softmax.default: safe_softmax,
}

LEAVES: dict[Any, Callable[[Any, tuple[Any, ...], Any], LeafKernel]] = {
    _bnb.dequantize_4bit.default: dequantize,
    _bnb.dequantize_4bit.out: dequantize,
    _bnb.dequantize_blockwise.default: dequantize,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}

CPU_KERNELS = Kernels(DECOMPOSITIONS, LEAVES)
