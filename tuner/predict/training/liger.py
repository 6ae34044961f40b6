"""Liger's kernels: the real ones for trials, and for traces their memory and traffic.

The shapes follow liger-kernel 0.8 (ops/rms_norm.py, ops/rope.py, ops/swiglu.py). Each kernel takes
the place of several of PyTorch's, keeps its input alone, and writes gradients where what it reads
in its backward pass was.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from tuner.core.errors import InputError
from tuner.predict.training.losses import require_liger
from tuner.space.models.trainable import LIGER_TYPES

NOT_IN_PLACE = ("gemma2", "gemma3_text")
"""Types of models whose norms follow one another: a gradient is needed after the norm's."""

PROCESSORS = 128
"""Multiprocessors of a GPU, each of which sums gradients of a norm's weights: 2 MB for a while."""


def apply_liger(model: Any) -> None:
    """Replace the model's norms, rotary embedding, MLP and loss by Liger's, as Trainer does.

    Trainer's argument is `use_liger_kernel`. Raises `InputError` where the package is not
    installed or has no kernels for this kind of model.
    """
    require_liger()
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise InputError(
            f"Liger has no kernels for models of type {kind!r}",
            hint=f"it has them for {', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}",
        )
    apply_liger_kernel(model, None)


def use_shapes(model: Any, *, gated: bool = True) -> None:
    """Give a model of a trace the memory and traffic of Liger's norms, rotary and, `gated`, MLP.

    Raises `InputError` for a type of models whose kernels are not known.
    """
    kind = model.config.model_type
    if kind not in LIGER_TYPES:
        raise InputError(
            f"Liger's kernels are not predicted for models of type {kind!r}",
            hint=f"they are for {', '.join(LIGER_TYPES)}",
        )
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            _norm(module, in_place=kind not in NOT_IN_PLACE)
        elif gated and hasattr(module, "gate_proj") and hasattr(module, "down_proj"):
            module.forward = types.MethodType(_mlp, module)
        elif hasattr(sys.modules[type(module).__module__], _ROTARY) and hasattr(module, "q_proj"):
            _rotate(module)


def _norm(module: Any, *, in_place: bool) -> None:
    def forward(hidden: torch.Tensor) -> Any:
        return _Norm.apply(hidden, module.weight, in_place)  # type: ignore[no-untyped-call]

    module.forward = forward


class _Norm(torch.autograd.Function):
    """LigerRMSNormFunction."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, in_place: bool
    ) -> torch.Tensor:
        normed = torch.empty_like(hidden)
        normed.copy_(hidden)
        scale = hidden.new_empty(hidden.shape[:-1].numel(), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, scale)
        ctx.in_place = in_place
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        rows = PROCESSORS if ctx.needs_input_grad[1] else 0
        parts = weight.new_empty((rows, weight.numel()), dtype=torch.float32)
        result = gradient if ctx.in_place else torch.zeros_like(gradient)
        result.mul_(hidden)
        return result, parts.sum(dim=0).to(weight.dtype) if rows else None, None


def _mlp(self: Any, hidden: torch.Tensor) -> Any:
    gate, up = self.gate_proj(hidden), self.up_proj(hidden)
    return self.down_proj(_Gated.apply(gate, up))  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    """LigerSiLUMulFunction, and that of GELU."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        gradient = gradient.contiguous()
        return gate.mul_(gradient), up.copy_(up)


_ROTARY = "apply_rotary_pos_emb"


def _rotate(module: Any) -> None:
    """Have a module call Liger's rotary embedding, which stands in the globals of its file."""
    names = vars(sys.modules[type(module).__module__])
    plain = names[_ROTARY]

    def begin(*_: Any) -> None:
        names[_ROTARY] = _Rotary.of

    def end(*_: Any) -> None:
        names[_ROTARY] = plain

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)


class _Rotary(torch.autograd.Function):
    """LigerRopeFunction: queries and keys are turned where they are."""

    @staticmethod
    def of(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, **_: Any) -> Any:
        return _Rotary.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any) -> Any:
        ctx.save_for_backward(cos, sin)
        return _turned(q), _turned(k)

    @staticmethod
    def backward(ctx: Any, of_q: torch.Tensor, of_k: torch.Tensor) -> tuple[Any, ...]:
        return _turned(of_q), _turned(of_k), None, None


def _turned(states: torch.Tensor) -> torch.Tensor:
    physical = states.transpose(1, 2).contiguous()
    physical.mul_(2)
    return physical.transpose(1, 2)
