"""Traces `flash_attention_2` on tensors without data, and without the flash-attn package.

That needs a CUDA compiler: PyTorch bundles the same kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tuner.predict.tracing.cuda_path import CudaPath

_aten = torch.ops.aten


@contextlib.contextmanager
def flash_attention_on_meta(path: CudaPath) -> Iterator[None]:
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
