"""Makes a model on tensors without data take the code path that it takes on a processor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as nn_functional

from tuner.predict.tracing.device_path import DevicePath, tensor

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
