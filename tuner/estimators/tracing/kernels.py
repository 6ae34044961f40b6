"""What CUDA kernels do that tensors without data do not show.

Two tables, keyed by operator:

* `DECOMPOSITIONS` spells out operators whose CUDA implementation allocates buffers on the
  way, as the sequence of allocations that implementation makes.
* `LEAVES` describes single kernels: their FLOPs, class, and the workspace alive beside
  inputs and outputs while they run.

Each entry names the implementation that it follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import bitsandbytes  # noqa: F401  (registers its operators and their fake implementations)
import torch

_aten = torch.ops.aten
_bnb = torch.ops.bitsandbytes


@dataclass(frozen=True, slots=True)
class LeafKernel:
    """One kernel: class of work, FLOPs, shape of a product, workspace, bytes beside in/out."""

    kind: str
    flops: int = 0
    shape: tuple[int, int, int, int] | None = None
    workspace_bytes: tuple[int, ...] = ()
    dtype: str | None = None


class Kernels(NamedTuple):
    """The two tables of one kind of device, by operator."""

    decompositions: Mapping[Any, Callable[..., Any]]
    leaves: Mapping[Any, Callable[[Any, tuple[Any, ...], Any], LeafKernel]]


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
    scaled = _bnb.int8_mm_dequant.default(product, row_stats, col_stats)
    if bias is not None and bias.dtype != torch.float16:
        scaled.add_(bias)
    result: torch.Tensor = scaled.to(dtype or torch.float16)
    return result


def safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Softmax, then zero where a whole row is masked out (aten attention.cpp)."""
    weights: torch.Tensor = _aten._softmax.default(scores, dim, False)
    masked_rows = (scores == float("-inf")).all(dim, keepdim=True)
    zero = torch.zeros((), dtype=weights.dtype, device=weights.device)
    return torch.where(masked_rows, zero, weights)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _bnb.gemm_4bit.default: gemm_4bit,
    _bnb.int8_vectorwise_quant.default: _int8_vectorwise_quant,
    _bnb.int8_mixed_scaled_mm.default: _int8_mixed_scaled_mm,
    _bnb.int8_scaled_mm.default: _int8_scaled_mm,
    _aten._safe_softmax.default: safe_softmax,
}


def dequantize(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    """Unpacks weights, or scales products of integers: memory traffic of a kind of its own."""
    return LeafKernel("dequantise")


def _int8_linear_matmul(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    rows, columns = math.prod(args[0].shape[:-1]), args[1].shape[0]
    inner = args[0].shape[-1]
    return LeafKernel(
        "matmul", flops=2 * rows * columns * inner, shape=(1, rows, columns, inner), dtype="int8"
    )


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *, causal: bool) -> int:
    """FLOPs of softmax(QK^T)V for [batch, heads, length, head_dim]; half of them when causal.

    The causal kernels skip the blocks above the diagonal.
    """
    batch, heads, queries, head_dim = query
    flops = 2 * batch * heads * queries * key[-2] * (head_dim + value[-1])
    return flops // 2 if causal else flops


def _flash_forward(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    query, key, value = args[:3]
    causal = bool(args[4]) if len(args) > 4 else False
    flops = attention_flops(query.shape, key.shape, value.shape, causal=causal)
    return LeafKernel("attention", flops=flops)


def _flash_backward(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    """Flash attention 2 as PyTorch bundles it (flash_api.cpp, mha_bwd).

    Workspace: row sums in fp32, dQ accumulated in fp32 with lengths rounded to 128 and head
    dimension to 32; with grouped queries dK and dV are computed per query head and summed.
    """
    _, query, key, value = args[:4]
    batch, heads, queries, head_dim = query.shape
    rounded_q = _round_up(queries, 128)
    rounded_d = _round_up(head_dim, 32 if head_dim <= 128 else 64)
    workspace = [batch * heads * rounded_q * 4, batch * heads * rounded_q * rounded_d * 4]
    if key.shape[1] != heads:
        expanded = batch * heads * key.shape[2] * head_dim * query.element_size()
        workspace += [expanded, expanded]
    causal = bool(args[11]) if len(args) > 11 else False
    # Five products instead of two: S and P again, dV, dP, dQ, dK.
    flops = attention_flops(query.shape, key.shape, value.shape, causal=causal) * 5 // 2
    return LeafKernel("attention", flops=flops, workspace_bytes=tuple(workspace))


def _efficient_forward(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    query, key, value = args[:3]
    causal = bool(args[6]) if len(args) > 6 else False
    flops = attention_flops(query.shape, key.shape, value.shape, causal=causal)
    return LeafKernel("attention", flops=flops)


def _efficient_backward(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    """Memory-efficient attention (CUTLASS) as PyTorch bundles it (attention_backward.cu).

    16-bit gradients are accumulated in an fp32 workspace: dQ always; dK and dV when the
    head does not fit the register file (head dimension above the block of 64).
    """
    _, query, key, value = args[:4]
    batch, heads, queries, head_dim = query.shape
    workspace = [batch * heads * queries * 4]
    if query.element_size() == 2:
        per_query = batch * heads * _round_up(queries, 64) * _round_up(head_dim, 32) * 4
        per_key = batch * heads * _round_up(key.shape[2], 64) * _round_up(head_dim, 64) * 4
        workspace.append(per_query + (2 * per_key if head_dim > 64 else 0))
    causal = bool(args[12]) if len(args) > 12 else False
    flops = attention_flops(query.shape, key.shape, value.shape, causal=causal) * 5 // 2
    return LeafKernel("attention", flops=flops, workspace_bytes=tuple(workspace))


def _softmax_backward(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    """Softmax backward first multiplies gradient and output into a buffer of its own.

    aten SoftMax.cu, softmax_backward_cuda_out; log_softmax has no such buffer.
    """
    gradient = args[0]
    return LeafKernel("elementwise", workspace_bytes=(gradient.numel() * gradient.element_size(),))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


LEAVES: dict[Any, Callable[[Any, tuple[Any, ...], Any], LeafKernel]] = {
    _bnb.dequantize_4bit.default: dequantize,
    _bnb.dequantize_4bit.out: dequantize,
    _bnb.dequantize_blockwise.default: dequantize,
    _bnb.int8_mm_dequant.default: dequantize,
    _bnb.int8_linear_matmul.default: _int8_linear_matmul,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._scaled_dot_product_flash_attention.default: _flash_forward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}

CUDA_KERNELS = Kernels(DECOMPOSITIONS, LEAVES)
