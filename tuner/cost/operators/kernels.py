"""Rules for PyTorch's own operators on CUDA, for fused attention, and for bitsandbytes.

A rule needs torch alone: the emulator reads it inside programs that may lack bitsandbytes.
Of fused attention, the four operators that a trace takes have entries with the workspace of their
kernels. All others (cuDNN's, flash-attn, xformers, kernels from a hub) are known by their name and
by the names of their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class _LeafKernel:
    """One kernel: class of work, FLOPs, shape as in `Work`, workspace, bytes beside in/out."""

    kind: str
    flops: int = 0
    shape: tuple[int, int, int, int] | None = None
    workspace_bytes: tuple[int, ...] = ()
    dtype: str | None = None
    has_mask: bool = False
    """Fused attention was given a dense mask, which makes it slower."""


LeafRule = Callable[[Any, tuple[Any, ...], Any], _LeafKernel]
"""The kernel of an operator with these arguments and results."""


class Kernels(NamedTuple):
    """The two tables of one kind of device, by operator."""

    decompositions: Mapping[Any, Callable[..., Any]]
    leaves: Mapping[Any, LeafRule]


_aten = torch.ops.aten

_FAMILY = ("attn", "attention", "flash", "fmha")
"""Parts of the names of fused attention's operators, package included."""

_HEADS_FIRST = ("aten::_scaled_dot_product", "aten::scaled_dot_product", "aten::_cudnn_attention")
"""Prefixes of operators that take [batch, heads, length, head_dim]; all others take
[batch, length, heads, head_dim], or [tokens, heads, head_dim] of sequences end to end."""


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *, causal: bool) -> int:
    """FLOPs of softmax(QK^T)V for [batch, heads, length, head_dim]; half of them when causal.

    The causal kernels skip the blocks above the diagonal.
    """
    batch, heads, queries, head_dim = query
    flops = 2 * batch * heads * queries * key[-2] * (head_dim + value[-1])
    return flops // 2 if causal else flops


def fused_attention(
    *,
    causal_at: int,
    backward: bool = False,
    mask_at: int | None = None,
    workspace: Callable[[torch.Tensor, torch.Tensor], tuple[int, ...]] = lambda query, key: (),
) -> LeafRule:
    """The rule of an operator of fused attention of PyTorch.

    Arguments are query, key and value, of a backward pass behind the gradient; `causal_at` and
    `mask_at` are the places of others. `workspace` are bytes beside inputs and outputs.
    """

    def rule(func: Any, args: tuple[Any, ...], out: Any) -> _LeafKernel:
        query, key, value = args[backward : backward + 3]
        causal = bool(args[causal_at]) if len(args) > causal_at else False
        flops = attention_flops(query.shape, key.shape, value.shape, causal=causal)
        # Heads are those of the queries: each is computed on its own, also where keys are shared.
        batch, heads, queries, head_dim = query.shape
        return _LeafKernel(
            "attention",
            # Backward takes five products instead of two: S and P again, dV, dP, dQ, dK.
            flops=flops * 5 // 2 if backward else flops,
            shape=(batch * heads, queries, key.shape[-2], head_dim),
            workspace_bytes=workspace(query, key),
            has_mask=mask_at is not None and args[mask_at] is not None,
        )

    return rule


def _flash_workspace(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    """Flash attention 2 backward as PyTorch bundles it (flash_api.cpp, mha_bwd).

    Row sums in fp32, dQ accumulated in fp32 with lengths rounded to 128 and head dimension to 32;
    with grouped queries dK and dV are computed per query head and summed.
    """
    batch, heads, queries, head_dim = query.shape
    rounded_q = _round_up(queries, 128)
    rounded_d = _round_up(head_dim, 32 if head_dim <= 128 else 64)
    workspace = [batch * heads * rounded_q * 4, batch * heads * rounded_q * rounded_d * 4]
    if key.shape[1] != heads:
        expanded = batch * heads * key.shape[2] * head_dim * query.element_size()
        workspace += [expanded, expanded]
    return tuple(workspace)


def _efficient_workspace(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    """Memory-efficient attention (CUTLASS) backward as PyTorch bundles it (attention_backward.cu).

    16-bit gradients are accumulated in an fp32 workspace: dQ always; dK and dV when the
    head does not fit the register file (head dimension above the block of 64).
    """
    batch, heads, queries, head_dim = query.shape
    workspace = [batch * heads * queries * 4]
    if query.element_size() == 2:
        per_query = batch * heads * _round_up(queries, 64) * _round_up(head_dim, 32) * 4
        per_key = batch * heads * _round_up(key.shape[2], 64) * _round_up(head_dim, 64) * 4
        workspace.append(per_query + (2 * per_key if head_dim > 64 else 0))
    return tuple(workspace)


def attention_by_name(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _LeafKernel | None:
    """The kernel of an operator of fused attention that has no entry; None for all others.

    Backward takes five products instead of two. Blocks that a causal mask or a window hides are
    not computed. Sequences that lie end to end attend to themselves only.
    """
    name = func._schema.name
    if not any(part in name for part in _FAMILY):
        return None
    given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    query, key, value = (
        _first(given, names) for names in (("query", "q"), ("key", "k"), ("value", "v"))
    )
    if not all(isinstance(t, torch.Tensor) and t.dim() >= 3 for t in (query, key, value)):
        return None
    length, heads = (-2, -3) if name.startswith(_HEADS_FIRST) else (-3, -2)
    pairs = _pairs(given, query, key, length)
    flops = 2 * query.shape[heads] * pairs * (query.shape[-1] + value.shape[-1])
    is_backward = "backward" in name or "bwd" in name
    batch = query.shape[0] if query.dim() > 3 else 1
    shape = (batch * query.shape[heads], query.shape[length], key.shape[length], query.shape[-1])
    bias = _first(given, ("attn_bias", "bias", "attn_mask"))
    return _LeafKernel(
        "attention",
        flops=int(flops * 5 / 2 if is_backward else flops),
        shape=shape,
        has_mask=isinstance(bias, torch.Tensor),
    )


def _first(given: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), None)


def _pairs(given: Mapping[str, Any], query: torch.Tensor, key: torch.Tensor, length: int) -> float:
    """Pairs of a query and a key that one head computes, over all sequences."""
    starts = _first(given, ("cu_seqlens_q", "cum_seq_q", "cu_seqlens", "seqstart_q"))
    causal = bool(_first(given, ("is_causal", "causal", "custom_mask_type")))
    window = _first(given, ("window_size_left", "window_left", "window_size"))
    reach = window if isinstance(window, int) and window > 0 else None
    if isinstance(starts, torch.Tensor) and starts.numel() > 1:
        tokens = query.shape[length]
        return sum(_visible(n, n, causal, reach) for n in _lengths(starts, tokens))
    batch = query.shape[0] if query.dim() > 3 else 1
    return batch * _visible(query.shape[length], key.shape[length], causal, reach)


def _lengths(starts: torch.Tensor, tokens: int) -> list[float]:
    """Lengths of sequences that begin at `starts`; all equal where those have no values."""
    if starts.is_meta:
        return [tokens / (starts.numel() - 1)] * (starts.numel() - 1)
    return [float(length) for length in starts.detach().cpu().diff().tolist()]


def _visible(queries: float, keys: float, causal: bool, reach: int | None) -> float:
    if not causal:
        return queries * (keys if reach is None else min(keys, 2 * reach + 1))
    if reach is None or reach >= keys:
        return queries * keys / 2
    return queries * reach - reach * reach / 2


ATTENTION_LEAVES: dict[Any, LeafRule] = {
    _aten._scaled_dot_product_flash_attention.default: fused_attention(causal_at=4),
    _aten._scaled_dot_product_flash_attention_backward.default: fused_attention(
        causal_at=11, backward=True, workspace=_flash_workspace
    ),
    _aten._scaled_dot_product_efficient_attention.default: fused_attention(causal_at=6, mask_at=3),
    _aten._scaled_dot_product_efficient_attention_backward.default: fused_attention(
        causal_at=12, backward=True, mask_at=4, workspace=_efficient_workspace
    ),
}


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Softmax, then zero where a whole row is masked out (aten attention.cpp)."""
    weights: torch.Tensor = _aten._softmax.default(scores, dim, False)
    masked_rows = (scores == float("-inf")).all(dim, keepdim=True)
    zero = torch.zeros((), dtype=weights.dtype, device=weights.device)
    return torch.where(masked_rows, zero, weights)


def _softmax_backward(func: Any, args: tuple[Any, ...], out: Any) -> _LeafKernel:
    """Softmax backward first multiplies gradient and output into a buffer of its own.

    aten SoftMax.cu, softmax_backward_cuda_out; log_softmax has no such buffer.
    """
    gradient = args[0]
    return _LeafKernel("elementwise", workspace_bytes=(gradient.numel() * gradient.element_size(),))


def _scaled_mm(func: Any, args: tuple[Any, ...], out: Any) -> _LeafKernel:
    """A product of 8-bit floats with scales."""
    (m, k), n = args[0].shape, args[1].shape[-1]
    return _LeafKernel("matmul", flops=2 * m * n * k, shape=(1, m, n, k))


def _linear(func: Any, args: tuple[Any, ...], out: Any) -> _LeafKernel:
    """`linear` where it reaches the device whole: without autograd it is not taken apart."""
    n, k = args[1].shape
    rows = math.prod(args[0].shape[:-1])
    return _LeafKernel("matmul", flops=2 * rows * n * k, shape=(1, rows, n, k))


def _matmul(func: Any, args: tuple[Any, ...], out: Any) -> _LeafKernel:
    """`matmul` where it reaches the device whole, as `linear`."""
    left, right = args[:2]
    k = left.shape[-1]
    n = right.shape[-1] if right.dim() > 1 else 1
    rows = out.numel() // n
    shared = right.dim() <= 2  # one right factor for all rows: one product
    m = rows if shared else left.shape[-2] if left.dim() > 1 else 1
    return _LeafKernel("matmul", flops=2 * rows * n * k, shape=(rows // m, m, n, k))


def _grouped_mm(func: Any, args: tuple[Any, ...], out: Any) -> _LeafKernel:
    """Products of one expert each, with `offs` where each expert's rows end.

    Every row meets one expert: [T, K] x [E, K, N] computes T rows. [M, T] x [T, N] sums over
    the T rows, in E pieces.
    """
    left, right = args[:2]
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    batch = left.shape[0] if left.dim() == 3 and right.dim() == 3 else 1
    return _LeafKernel("matmul", flops=2 * batch * m * n * k, shape=(batch, m, n, k))


def _recurrent(func: Any, args: tuple[Any, ...], out: Any) -> _LeafKernel:
    """Recurrent layers of cuDNN: each weight meets the rows of all steps, one step after another.

    A backward pass has two products for each. Waits between the steps are not in it.
    """
    rows, weights, state = args[0], args[1], args[4]
    count = rows.numel() // rows.shape[-1]
    products = 2 if "backward" in func._schema.name else 1
    flops = products * 2 * count * sum(one.numel() for one in weights if one.dim() == 2)
    batch, hidden = state.shape[-2:]
    steps = max(1, count // batch)
    return _LeafKernel("matmul", flops=flops, shape=(steps, batch, weights[0].shape[0], hidden))


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
    **_overloads(("_cudnn_rnn", "_cudnn_rnn_backward"), _recurrent),
}


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


def dequantize(func: Any, args: tuple[Any, ...], out: Any) -> _LeafKernel:
    """Unpacks weights, or scales products of integers: memory traffic of a kind of its own."""
    return _LeafKernel("dequantise")


def _int8_linear_matmul(func: Any, args: tuple[Any, ...], out: Any) -> _LeafKernel:
    rows, columns = math.prod(args[0].shape[:-1]), args[1].shape[0]
    inner = args[0].shape[-1]
    return _LeafKernel(
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
