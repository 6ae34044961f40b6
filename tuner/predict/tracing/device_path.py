"""Makes a model on tensors without data take the code path of a device: precision and kernels.

PyTorch chooses autocast and some kernels from the device of a tensor before any operator is
dispatched. `DevicePath` is a function mode that makes those choices; its subclasses know what
CUDA (`cuda_path`) and the processor (`cpu_path`) choose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

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
    """Whether the device has kernels for products of one expert each (`torch.nn.functional`)."""

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
