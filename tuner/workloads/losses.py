"""Cross entropy over the vocabulary, in the ways in which versions of transformers compute it.

The logits are the largest tensors of a training step, so a copy more or less decides the peak.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tuner.errors import unknown

NAMES = ("transformers", "transformers_4_46", "transformers_4_45", "unwidened", "fused")

_IGNORE_INDEX = -100


def use_loss(model: Any, name: str) -> None:
    """Make a transformers model compute its loss as `name` says.

    * `transformers`: as the installed version does; since 4.49 in fp32 without a copy.
    * `transformers_4_46`: up to 4.48, a shifted copy of the fp32 logits.
    * `transformers_4_45`: up to 4.45 the model also widened the logits that it returns.
    * `unwidened`: up to 4.48, models such as GPT-BigCode that left the logits in their precision.
    * `fused`: one kernel on 16-bit logits that keeps a number a token and turns the logits into
      their gradient in place, as the Triton kernels of unsloth and its descendants do.

    Raises `InputError` for other names.
    """
    if name == "transformers":
        return
    if name == "fused":
        model.loss_function = _fused
        return
    if name not in NAMES:
        raise unknown("loss", name, NAMES)
    model.loss_function = partial(_shifted_copy, widen=name != "unwidened")
    if name == "transformers_4_45":
        model.get_output_embeddings().register_forward_hook(_widen)


def _widen(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.float()


def _shifted_copy(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, *, widen: bool, **_: Any
) -> torch.Tensor:
    logits = logits.float() if widen else logits
    shifted = logits[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous()
    return nn.functional.cross_entropy(
        shifted.view(-1, vocab_size), targets.view(-1), ignore_index=_IGNORE_INDEX
    )


def _fused(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    targets = labels[..., 1:].reshape(-1)
    loss: torch.Tensor = _FusedCrossEntropy.apply(shifted, targets)  # type: ignore[no-untyped-call]
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
