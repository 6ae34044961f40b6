"""Calls of libraries that ask for the device of a tensor, answered as the traced device would.

peft and transformers decide by `tensor.device.type` what to run. On tensors without data that is
"meta", for which PyTorch has no autocast and no grouped products in fp32.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tuner.predict.tracing.cuda_path import CudaPath
from tuner.predict.tracing.device_path import DevicePath

_ROW_BYTES = 16
"""To which rows of a grouped product's result are rounded up (aten's GroupedMMUtils.h)."""


@contextlib.contextmanager
def library_calls_on_meta(path: DevicePath) -> Iterator[None]:
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
        asks_for_path = isinstance(path, CudaPath) if not device_type else device_type == ("meta",)
        if not asks_for_path:
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
