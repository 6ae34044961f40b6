"""Rules for the operators of bitsandbytes, for wherever it has registered them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tuner.cost.operators.aten_kernels import Kernels, LeafKernel, LeafRule

_aten = torch.ops.aten
_bnb = torch.ops.bitsandbytes


def gemm_4bit(
    a: torch.Tensor,
    b: torch.Tensor,
    shape_b: list[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantise the whole weight, then a plain product: bitsandbytes 0.50, default backend.

    bitsandbytes 0.50 has a fused kernel for up to a few hundred rows; training steps have
    more, and earlier versions always do this.
    """
    if absmax_8bit is not None:
        assert absmax_code is not None
        assert absmax_offset is not None
        dequantised = _bnb.dequantize_blockwise.default(
            absmax_8bit, absmax, absmax_code, 256, torch.float32
        )
        absmax = dequantised + absmax_offset
    weight = _bnb.dequantize_4bit.default(b, absmax, blocksize, quant_type, shape_b, a.dtype)
    # The product that linear() comes to: below autograd it would not be taken apart.
    rows = a.reshape(-1, a.shape[-1])
    product = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return product.view(*a.shape[:-1], weight.shape[0])


def _int8_vectorwise_quant(
    a: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Row-wise absmax quantisation with the outlier search of LLM.int8().

    The number of outlier columns depends on the data; none are assumed, because a few columns
    of thousands change neither memory nor time.
    """
    row_stats = torch.empty(a.numel() // a.shape[-1], device=a.device, dtype=torch.float32)
    out_row = torch.empty(a.shape, device=a.device, dtype=torch.int8)
    outlier_columns = None
    if threshold > 0.0:
        outliers = a.abs() >= threshold
        outliers.any()
        outlier_columns = torch.empty(0, device=a.device, dtype=torch.int64)
    # The quantisation kernel reads the input once and writes the rows.
    _aten.copy_.default(out_row, a)
    return out_row, row_stats, outlier_columns


def _int8_mixed_scaled_mm(
    a: torch.Tensor,
    ca: torch.Tensor,
    cb: torch.Tensor,
    sca: torch.Tensor,
    scb: torch.Tensor,
    outlier_cols: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    sub_a = torch.empty(0, device=a.device, dtype=a.dtype)
    return _int8_scaled_mm(ca, cb, sca, scb, bias=bias, dtype=a.dtype), sub_a


def _int8_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    product = _bnb.int8_linear_matmul.default(a, b)
    scaled: torch.Tensor = _bnb.int8_mm_dequant.default(product, row_stats, col_stats)
    if bias is not None and bias.dtype != torch.float16:
        scaled.add_(bias)
    wanted = dtype or torch.float16
    # `to` itself would reach the mode of the trace, as a view.
    result: torch.Tensor = (
        scaled if wanted is scaled.dtype else _aten._to_copy(scaled, dtype=wanted)
    )
    return result


def dequantize(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    """Unpacks weights, or scales products of integers: memory traffic of a kind of its own."""
    return LeafKernel("dequantise")


def _int8_linear_matmul(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    rows, columns = math.prod(args[0].shape[:-1]), args[1].shape[0]
    inner = args[0].shape[-1]
    return LeafKernel(
        "matmul", flops=2 * rows * columns * inner, shape=(1, rows, columns, inner), dtype="int8"
    )


_DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "gemm_4bit": gemm_4bit,
    "int8_vectorwise_quant": _int8_vectorwise_quant,
    "int8_mixed_scaled_mm": _int8_mixed_scaled_mm,
    "int8_scaled_mm": _int8_scaled_mm,
}

_LEAVES: dict[str, LeafRule] = {
    "dequantize_4bit": dequantize,
    "dequantize_blockwise": dequantize,
    "int8_mm_dequant": dequantize,
    "int8_linear_matmul": _int8_linear_matmul,
    "gemv_4bit": dequantize,
}


def bnb_kernels() -> Kernels:
    """The rules for those operators that the installed version has registered by now."""
    return Kernels(_registered(_DECOMPOSITIONS), _registered(_LEAVES))


def _registered(rules: dict[str, Any]) -> dict[Any, Any]:
    packets = {name: getattr(_bnb, name, None) for name in rules}
    return {
        getattr(packet, overload): rules[name]
        for name, packet in packets.items()
        if packet is not None
        for overload in packet.overloads()
    }
