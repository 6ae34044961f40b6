"""Makes a model on tensors without data take the code path of a device: precision and kernels.

PyTorch chooses autocast and some kernels from the device of a tensor before any operator is
dispatched. `DevicePath` is a function mode that makes those choices; its subclasses know the
choices of CUDA (`cuda_path`) and of the processor (`CpuPath`, below). `flash_attention_2` is traced
without the flash-attn package, which needs a CUDA compiler: PyTorch bundles the same kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.nn import functional as nn_functional
from torch.overrides import TorchFunctionMode

HALF = (torch.float16, torch.bfloat16)
"""The 16-bit types."""

PRODUCTS: frozenset[Any] = frozenset(
    {
        nn_functional.linear,
        nn_functional.conv1d,
        nn_functional.conv2d,
        nn_functional.scaled_dot_product_attention,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.addbmm,
        torch.baddbmm,
        torch.einsum,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.mm,
        torch.Tensor.bmm,
        torch.Tensor.addmm,
        torch.Tensor.addbmm,
        torch.Tensor.baddbmm,
    }
)
"""The operators that autocast runs in the lower precision, on CUDA and on the processor alike
(aten/src/ATen/autocast_mode.h), as far as models call them from Python."""


class DevicePath(TorchFunctionMode):
    """Function mode with the choices of one kind of device.

    `to_fp32` are the operators that its autocast runs in fp32, `replacements` functions that are
    called (with this mode and the original) in place of others.
    """

    to_fp32: ClassVar[frozenset[Any]]
    replacements: ClassVar[Mapping[Any, Callable[..., torch.Tensor]]]
    has_grouped_products = True
    """The device has kernels for products of one expert each (`torch.nn.functional`)."""

    def __init__(self) -> None:
        super().__init__()
        self._autocast_dtype: torch.dtype | None = None
        self._weight_casts: dict[int, torch.Tensor] = {}

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of the autocast that is active, or None."""
        return self._autocast_dtype

    @contextlib.contextmanager
    def autocast(self, dtype: torch.dtype) -> Iterator[None]:
        """As `torch.autocast(device, dtype)`, including its cache of trainable weights."""
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
            elif func in self.to_fp32 and kwargs.get("dtype") is None:
                args, kwargs = self._cast_all(args, kwargs, torch.float32)
        replacement = self.replacements.get(func)
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


def tensor(value: Any) -> torch.Tensor:
    """A tensor by type, from calls that PyTorch's stubs leave untyped."""
    assert isinstance(value, torch.Tensor)
    return value


_aten = torch.ops.aten


class CpuPath(DevicePath):
    """Function mode with the processor's choices.

    Attention runs a fused kernel, with grouped queries and masks too, unless it drops out or
    values are of another size than queries (sdp_utils_cpp.cpp, use_flash_attention_cpp).
    Everything else takes the plain operators, as tensors without data do by themselves.
    """

    # autocast_mode.cpp, the registrations for AutocastCPU: norms and softmax are not among them.
    to_fp32 = frozenset({nn_functional.mse_loss, nn_functional.nll_loss})

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
        if dropout_p > 0 or query.shape[-1] != value.shape[-1]:
            return tensor(
                func(
                    query,
                    key,
                    value,
                    attn_mask,
                    dropout_p,
                    is_causal,
                    scale=scale,
                    enable_gqa=enable_gqa,
                )
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # convert_boolean_attn_mask in attention.cpp
            additive = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = additive.masked_fill_(attn_mask.logical_not(), float("-inf"))
        return tensor(
            _aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
        )


CpuPath.replacements = {nn_functional.scaled_dot_product_attention: CpuPath._attention}


@contextlib.contextmanager
def int8_products_on_cpu() -> Iterator[None]:
    """Inside, bitsandbytes' int8 layers widen their weights, as they do on a processor.

    `bitsandbytes.autograd._functions.matmul` asks for the device of its input.
    """
    import bitsandbytes
    from bitsandbytes.autograd._functions import MatMul8bitFp

    def matmul(a: Any, b: Any, out: Any = None, state: Any = None, **options: Any) -> Any:
        return MatMul8bitFp.apply(a, b, out, options.get("bias"), state)

    with mock.patch.object(bitsandbytes, "matmul", matmul):
        yield


@contextlib.contextmanager
def flash_attention_on_meta(path: DevicePath) -> Iterator[None]:
    """Inside, transformers models with `flash_attention_2` can be built and traced.

    `path` knows the precision of autocast, to which fp32 queries are narrowed.
    """
    from transformers import modeling_utils
    from transformers.integrations import flash_attention

    def accept(*_: Any, **__: Any) -> bool:
        return True

    def can_dispatch(model: Any, *_: Any, **__: Any) -> bool:
        # As `_flash_attn_can_dispatch`, without its questions about packages and devices.
        if not model._supports_flash_attn:
            raise ValueError(f"{type(model).__name__} does not support flash attention")
        return True

    def target_dtype(query: torch.Tensor, module: Any) -> torch.dtype | None:
        # As transformers' get_target_dtype, which asks torch for autocast on a real device.
        if query.dtype is not torch.float32:
            return None
        if path.autocast_dtype is not None:
            return path.autocast_dtype
        dtype: torch.dtype = module.config.dtype
        return dtype

    replacements = [
        (modeling_utils.PreTrainedModel, "_flash_attn_can_dispatch", can_dispatch),
        (modeling_utils, "lazy_import_flash_attention", accept),
        (flash_attention, "get_target_dtype", target_dtype),
        (flash_attention, "_flash_attention_forward", _forward),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Transformers' `_flash_attention_forward` for full batches, [batch, length, heads, dim].

    A sliding window is not counted: it saves time, not memory. fp32 inputs (k-bit preparation)
    become `target_dtype`, as there.
    """
    target_dtype = options.get("target_dtype")
    if target_dtype is not None and query.dtype is torch.float32:
        query, key, value = (tensor.to(target_dtype) for tensor in (query, key, value))
    output: torch.Tensor = _aten._scaled_dot_product_flash_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        options.get("dropout", 0.0),
        options["is_causal"],
        False,
        scale=options.get("softmax_scale"),
    )[0]
    return output.transpose(1, 2)
