"""Cross entropy over the vocabulary, in the ways in which versions of transformers compute it.

The logits are the largest tensors of a training step, so a copy more or less decides the peak.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tuner.core.errors import unknown

_IGNORE_INDEX = -100

CrossEntropy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A mean loss over (tokens, vocabulary) logits and (tokens,) labels."""


def use_loss(model: Any, name: str, *, fused: bool, kernel: CrossEntropy | None = None) -> None:
    """Make a transformers model compute its loss as `name`, one of `LOSSES`, says.

    With `fused` one kernel takes the place of log-softmax and its gradient: it keeps a number a
    token and turns its input into the gradient in place, as the Triton kernels of unsloth and
    fms-acceleration do: `kernel`, or without it one that has the memory and the traffic of such
    a kernel and no values, for traces. Raises `InputError` for other names.
    """
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    if name == "transformers" and not fused:
        return
    LOSSES[name](model, (kernel or _fused_shapes) if fused else _cross_entropy)


def use_padded(model: Any, cross_entropy: CrossEntropy) -> None:
    """The labels are shifted, and the fp32 logits are used as they are."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        logits = logits.float()
        targets = nn.functional.pad(labels, (0, 1), value=_IGNORE_INDEX)[..., 1:]
        return cross_entropy(logits.view(-1, vocab_size), targets.reshape(-1))

    model.loss_function = loss


def use_shifted(model: Any, cross_entropy: CrossEntropy, *, widen: bool = True) -> None:
    """The logits are shifted, which copies them: in fp32, or unless `widen` in their precision."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        logits = logits.float() if widen else logits
        shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
        return cross_entropy(shifted, labels[..., 1:].reshape(-1))

    model.loss_function = loss


LOSSES: dict[str, Callable[[Any, CrossEntropy], None]] = {
    "transformers": use_padded,
    "transformers_4_46": use_shifted,
}
"""As the installed version does, since 4.49 without a copy, and as 4.46 to 4.48 did.

`chunked_loss` has no logits at all. What reproduces runs of still older versions may add to it.
"""


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels, ignore_index=_IGNORE_INDEX)


def _fused_shapes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = _FusedCrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    return loss


class _FusedCrossEntropy(torch.autograd.Function):
    """Allocations and traffic of a fused kernel. For traces: it needs no values."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = torch.logsumexp(logits.detach()[:, :1].float(), 1)
        ctx.save_for_backward(logits, losses)
        return losses.sum() / labels.numel()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, _ = ctx.saved_tensors
        return logits.mul_(gradient), None
