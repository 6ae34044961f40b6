"""Cross entropy over the vocabulary, in the ways in which versions of transformers compute it.

The logits are the largest tensors of a training step, so a copy more or less decides the peak.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tuner.errors import unknown

NAMES = ("transformers", "transformers_4_46", "transformers_4_45", "unwidened")

_IGNORE_INDEX = -100


CrossEntropy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A mean loss over (tokens, vocabulary) logits and (tokens,) labels."""


def use_loss(model: Any, name: str, *, fused: bool, kernel: CrossEntropy | None = None) -> None:
    """Make a transformers model compute its loss as `name` says.

    * `transformers`: as the installed version does; since 4.49 in fp32 without a copy.
    * `transformers_4_46`: up to 4.48, a shifted copy of the fp32 logits.
    * `transformers_4_45`: up to 4.45 the model also widened the logits that it returns.
    * `unwidened`: up to 4.48, models such as GPT-BigCode that left the logits in their precision.

    With `fused` one kernel takes the place of log-softmax and its gradient: it keeps a number a
    token and turns its input into the gradient in place, as the Triton kernels of unsloth and
    fms-acceleration do: `kernel`, or without it one that has the memory and the traffic of such
    a kernel and no values, for traces. Raises `InputError` for other names.
    """
    if name not in NAMES:
        raise unknown("loss", name, NAMES)
    if name == "transformers" and not fused:
        return
    model.loss_function = partial(
        _loss,
        widen=name != "unwidened",
        copy=name != "transformers",
        cross_entropy=(kernel or _fused_shapes) if fused else _cross_entropy,
    )
    if name == "transformers_4_45":
        model.get_output_embeddings().register_forward_hook(_widen)


def _widen(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.float()


def _loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    *,
    widen: bool,
    copy: bool,
    cross_entropy: CrossEntropy,
    **_: Any,
) -> torch.Tensor:
    logits = logits.float() if widen else logits
    if copy:
        shifted, targets = logits[..., :-1, :].contiguous(), labels[..., 1:]
    else:
        shifted, targets = logits, nn.functional.pad(labels, (0, 1), value=_IGNORE_INDEX)[..., 1:]
    shifted, targets = shifted.view(-1, vocab_size), targets.reshape(-1)
    return cross_entropy(shifted, targets)


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
