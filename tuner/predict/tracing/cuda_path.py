"""Makes a model on tensors without data take the code path that it takes on a CUDA device.

PyTorch chooses some kernels from the device of a tensor before any operator is dispatched:
fused attention, fused dropout, softmax that widens while it reads, and autocast. A model on
the meta device would take the CPU's choice and save other tensors for backward. `CudaPath`
is a function mode that makes the choices that CUDA makes.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as nn_functional
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)
"""The 16-bit types."""

PRODUCTS: frozenset[Any] = frozenset({
    nn_functional.linear, nn_functional.conv1d, nn_functional.conv2d,
    nn_functional.scaled_dot_product_attention, torch.matmul, torch.mm, torch.bmm, torch.addmm,
    torch.addbmm, torch.baddbmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__,
    torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.addmm, torch.Tensor.addbmm,
    torch.Tensor.baddbmm,
})  # fmt: skip
"""The operators that autocast runs in the lower precision (aten/src/ATen/autocast_mode.h), as far
as models call them from Python."""

# The operators that CUDA autocast runs in fp32 (aten/src/ATen/autocast_mode.h, AT_FORALL_FP32),
# as far as models call them from Python.
_TO_FP32: frozenset[Any] = frozenset({
    nn_functional.layer_norm, nn_functional.group_norm, nn_functional.cross_entropy,
    nn_functional.nll_loss, nn_functional.mse_loss, nn_functional.softplus, nn_functional.softmax,
    nn_functional.log_softmax, torch.softmax, torch.log_softmax, torch.Tensor.softmax, torch.pow,
    torch.rsqrt, torch.exp, torch.log, torch.cumsum, torch.norm, torch.Tensor.pow,
    torch.Tensor.__pow__, torch.Tensor.rsqrt, torch.Tensor.exp, torch.Tensor.log,
    torch.Tensor.cumsum, torch.Tensor.norm,
})  # fmt: skip


class CudaPath(TorchFunctionMode):
    """Function mode with CUDA's choices for one compute capability.

    Flash attention needs capability 8.0, 16-bit inputs, no mask and head dimension at most
    256; otherwise the memory-efficient kernel runs (sdp_utils.cpp, use_flash_attention).
    """

    def __init__(self, compute_capability: tuple[int, int]) -> None:
        super().__init__()
        self._has_flash = compute_capability >= (8, 0)
        # transformers' moe.py, _can_use_grouped_mm
        self.has_grouped_products = compute_capability >= (8, 0)
        self._autocast_dtype: torch.dtype | None = None
        self._weight_casts: dict[int, torch.Tensor] = {}

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of the autocast that is active, or None."""
        return self._autocast_dtype

    @contextlib.contextmanager
    def autocast(self, dtype: torch.dtype) -> Iterator[None]:
        """As `torch.autocast("cuda", dtype)`, including its cache of trainable weights."""
        before, self._autocast_dtype = self._autocast_dtype, dtype
        try:
            yield
        finally:
            self._autocast_dtype = before
            if before is None:
                self._weight_casts.clear()

    @contextlib.contextmanager
    def no_autocast(self) -> Iterator[None]:
        """The state in which backward runs outside of recomputed parts."""
        before, self._autocast_dtype = self._autocast_dtype, None
        try:
            yield
        finally:
            self._autocast_dtype = before

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._autocast_dtype is not None:
            if func in PRODUCTS:
                args, kwargs = self._cast_all(args, kwargs, self._autocast_dtype)
            elif func in _TO_FP32 and kwargs.get("dtype") is None:
                args, kwargs = self._cast_all(args, kwargs, torch.float32)
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            return replacement(self, func, *args, **kwargs)
        return func(*args, **kwargs)

    def _cast_all(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            tuple(self._cast(value, dtype) for value in args),
            {name: self._cast(value, dtype) for name, value in kwargs.items()},
        )

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype == dtype:
            return value
        if not value.is_floating_point() or value.dtype == torch.float64:
            return value
        is_weight = (
            value.dtype == torch.float32
            and dtype in HALF
            and value.is_leaf
            and value.requires_grad
            and not value._is_view()
        )
        if not is_weight:
            return value.to(dtype)
        cast = self._weight_casts.get(id(value))
        if cast is None:
            cast = self._weight_casts[id(value)] = value.to(dtype)
        return cast

    def _attention(
        self,
        func: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        flash = (
            self._has_flash
            and attn_mask is None
            and query.dtype in HALF
            and query.shape[-1] == value.shape[-1] <= 256
        )
        # Head dimensions are padded to a multiple of 8 (sdp::pad_last_dim): the models in the
        # catalogue have such dimensions already.
        if flash:
            return tensor(
                _aten._scaled_dot_product_flash_attention(
                    query, key, value, dropout_p, is_causal, False, scale=scale
                )[0]
            )
        if enable_gqa and key.shape[1] != query.shape[1]:
            # The memory-efficient kernel refuses grouped queries (sdp_utils.cpp,
            # check_batch_size_and_num_heads_dense): PyTorch falls back to its formula.
            return _math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if attn_mask is not None:
            attn_mask = _additive_mask(attn_mask, query)
        return tensor(
            _aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
            )[0]
        )

    def _dropout(
        self,
        func: Any,
        x: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        # CUDA fuses dropout and keeps a mask of one byte an element (aten Dropout.cpp,
        # is_fused_kernel_acceptable); the CPU keeps a mask in the input's precision.
        if not training or p == 0 or inplace:
            return tensor(func(x, p, training, inplace))
        return torch.native_dropout(x, p, True)[0]

    def _softmax(
        self,
        func: Any,
        x: torch.Tensor,
        dim: int | None = None,
        _stacklevel: int = 3,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        # Half to float is one kernel on CUDA (aten SoftMax.cpp); bfloat16 is converted first.
        if dtype is torch.float32 and x.dtype is torch.float16 and dim is not None:
            return tensor(_aten._softmax(x, dim, True))
        return tensor(func(x, dim, _stacklevel, dtype))


def tensor(value: Any) -> torch.Tensor:
    """A tensor by type, from calls that PyTorch's stubs leave untyped."""
    assert isinstance(value, torch.Tensor)
    return value


def _math_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention without a fused kernel (attention.cpp, _scaled_dot_product_attention_math).

    16-bit inputs are widened to fp32 and query and key are both scaled, so that all scores
    exist in fp32.
    """
    dtype = query.dtype
    query, key, value = query.float(), key.float(), value.float()
    factor = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    query = query * factor
    if is_causal:
        ones = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        attn_mask = ones.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        additive = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = additive.masked_fill_(attn_mask.logical_not(), float("-inf"))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(-2, -1) * factor)
    if attn_mask is not None:
        scores = scores.add_(attn_mask)
    weights = tensor(_aten._safe_softmax(scores, -1))
    if dropout_p > 0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    # The formula returns its weights too, narrowed, before it multiplies; they stay unused.
    narrowed = weights.to(dtype)
    result = torch.matmul(weights, value).to(dtype)
    del narrowed
    return result


def _additive_mask(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    # The efficient kernel takes an additive mask in the query's precision, one value a pair
    # of positions, expanded over heads (convert_boolean_attn_mask in attention.cpp).
    if mask.dtype == torch.bool:
        additive = torch.zeros_like(mask, dtype=query.dtype)
        additive.masked_fill_(mask.logical_not(), float("-inf"))
        mask = additive
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], mask.shape[-1])


_REPLACEMENTS: Mapping[Any, Callable[..., torch.Tensor]] = {
    nn_functional.scaled_dot_product_attention: CudaPath._attention,
    nn_functional.dropout: CudaPath._dropout,
    nn_functional.softmax: CudaPath._softmax,
}


_ROW_BYTES = 16
"""To which rows of a grouped product's result are rounded up (aten's GroupedMMUtils.h)."""


@contextlib.contextmanager
def library_calls_on_meta(path: CudaPath) -> Iterator[None]:
    """Inside, models and adapters with experts can be traced as on the device of `path`."""
    import torch._meta_registrations as meta_registrations
    from bitsandbytes.nn import Params4bit
    from transformers.integrations import moe

    has_grouped_products = path.has_grouped_products

    def can_use_grouped_mm(*_: Any) -> bool:
        return has_grouped_products

    def autocast(device_type: str, *arguments: Any, **options: Any) -> Any:
        if device_type != "meta":
            return real_autocast(device_type, *arguments, **options)
        if not options.get("enabled", True):
            return path.no_autocast()
        return path.autocast(options.get("dtype") or torch.bfloat16)

    def is_autocast_enabled(*device_type: str) -> bool:
        # peft's quantised layers and Nemotron ask without a device, which means CUDA.
        if device_type not in ((), ("meta",)):
            return real_is_autocast_enabled(*device_type)
        return path.autocast_dtype is not None

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        if device_type == "meta":
            return path.autocast_dtype or torch.float16  # which CUDA says without autocast
        return real_get_autocast_dtype(device_type)

    real_autocast, real_is_autocast_enabled = torch.autocast, torch.is_autocast_enabled
    real_get_autocast_dtype = torch.get_autocast_dtype
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (torch, "autocast", autocast),
            (torch, "is_autocast_enabled", is_autocast_enabled),
            (torch, "get_autocast_dtype", get_autocast_dtype),
            (moe, "_can_use_grouped_mm", can_use_grouped_mm),
            (Params4bit, "__deepcopy__", _copied),
            (meta_registrations, "_meta_grouped_mm_common", _grouped_product),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def _copied(weight: Any, memo: Any) -> Any:
    """A copy of a 4-bit weight, as DoRA makes one; bitsandbytes begins it on the host."""
    options = ("blocksize", "compress_statistics", "quant_type", "bnb_quantized")
    return type(weight)(
        weight.data.clone(),
        requires_grad=False,
        quant_state=copy.deepcopy(weight.quant_state, memo),
        **{name: getattr(weight, name) for name in options},
    )


def _grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> torch.Tensor:
    """A result of a grouped product, in any precision.

    PyTorch's own rule for tensors without data refuses all but bfloat16; its kernels run the
    others one expert after the other, into the same result (`_grouped_mm_fallback`, aten).
    """
    flat = left.dim() == 2, right.dim() == 2
    rows, columns = left.shape[-2], right.shape[-1]
    if all(flat):
        assert offs is not None
        shape = [offs.shape[0], rows, columns]
    elif any(flat):
        shape = [rows, columns]
    else:
        shape = [left.shape[0], rows, columns]
    dtype = out_dtype or left.dtype
    step = _ROW_BYTES // dtype.itemsize
    pitch = -(-columns // step) * step
    strides = [rows * pitch, pitch, 1][-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device=left.device)
