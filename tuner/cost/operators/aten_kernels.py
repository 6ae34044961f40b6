"""Rules for PyTorch's own operators on CUDA, but for attention (`attention_kernels`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tuner.cost.operators.attention_kernels import ATTENTION_LEAVES
from tuner.cost.operators.leaf_kernels import LeafKernel, LeafRule

_aten = torch.ops.aten


def safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Softmax, then zero where a whole row is masked out (aten attention.cpp)."""
    weights: torch.Tensor = _aten._softmax.default(scores, dim, False)
    masked_rows = (scores == float("-inf")).all(dim, keepdim=True)
    zero = torch.zeros((), dtype=weights.dtype, device=weights.device)
    return torch.where(masked_rows, zero, weights)


def _softmax_backward(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    """Softmax backward first multiplies gradient and output into a buffer of its own.

    aten SoftMax.cu, softmax_backward_cuda_out; log_softmax has no such buffer.
    """
    gradient = args[0]
    return LeafKernel("elementwise", workspace_bytes=(gradient.numel() * gradient.element_size(),))


def _scaled_mm(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    """A product of 8-bit floats with scales."""
    (m, k), n = args[0].shape, args[1].shape[-1]
    return LeafKernel("matmul", flops=2 * m * n * k, shape=(1, m, n, k))


def _linear(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    """`linear` where it reaches the device whole: without autograd it is not taken apart."""
    n, k = args[1].shape
    rows = math.prod(args[0].shape[:-1])
    return LeafKernel("matmul", flops=2 * rows * n * k, shape=(1, rows, n, k))


def _matmul(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    """`matmul` where it reaches the device whole, as `linear`."""
    left, right = args[:2]
    k = left.shape[-1]
    n = right.shape[-1] if right.dim() > 1 else 1
    rows = out.numel() // n
    shared = right.dim() <= 2  # one right factor for all rows: one product
    m = rows if shared else left.shape[-2] if left.dim() > 1 else 1
    return LeafKernel("matmul", flops=2 * rows * n * k, shape=(rows // m, m, n, k))


def _grouped_mm(func: Any, args: tuple[Any, ...], out: Any) -> LeafKernel:
    """Products of one expert each, with `offs` where each expert's rows end.

    Every row meets one expert: [T, K] x [E, K, N] computes T rows. [M, T] x [T, N] sums over
    the T rows, in E pieces.
    """
    left, right = args[:2]
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    batch = left.shape[0] if left.dim() == 3 and right.dim() == 3 else 1
    return LeafKernel("matmul", flops=2 * batch * m * n * k, shape=(batch, m, n, k))


def _overloads(names: tuple[str, ...], rule: LeafRule) -> dict[Any, LeafRule]:
    """The rule for every overload of these operators that this version of PyTorch has."""
    packets = [getattr(_aten, name, None) for name in names]
    return {getattr(p, which): rule for p in packets if p is not None for which in p.overloads()}


ATEN_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {_aten._safe_softmax.default: safe_softmax}

ATEN_LEAVES: dict[Any, LeafRule] = {
    _aten._softmax_backward_data.default: _softmax_backward,
    **ATTENTION_LEAVES,
    **_overloads(("_scaled_mm", "_scaled_mm_v2"), _scaled_mm),
    **_overloads(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped_mm),
    **_overloads(("linear",), _linear),
    **_overloads(("matmul",), _matmul),
}
