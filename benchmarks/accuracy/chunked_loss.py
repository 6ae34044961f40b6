"""Head and cross entropy in chunks, so that no logits of a whole batch exist: Liger's loss.

As in fms-acceleration's fused-ops-and-kernels plugin (kernels/liger/
fused_linear_cross_entropy_loss.py): the gradients of the hidden states, and of the head where it is
trained, are computed in the forward pass; the backward pass only scales them.
"""

from __future__ import annotations

from typing import Any

import torch


class ChunkedLossWorkload:
    """A workload whose models compute head and loss together, a chunk of tokens at a time."""

    def __init__(self, workload: Any) -> None:
        self._workload = workload
        self.name = workload.name

    def open(self, model_config: Any, configuration: Any, environment: Any) -> Any:
        """As the workload, with another head and loss."""
        session = self._workload.open(model_config, configuration, environment)
        use_chunked_loss(session.model)
        return session


def use_chunked_loss(model: Any) -> None:
    """Let the head pass hidden states on and the loss do the head's product."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = causal.get_output_embeddings()
    head.forward = lambda hidden: hidden

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> Any:
        shifted = logits[..., :-1, :].contiguous()
        return _ChunkedLoss.apply(shifted.view(-1, shifted.shape[-1]), head.weight, labels)

    def forget(module: Any, inputs: Any, outputs: Any) -> None:
        outputs["logits"] = outputs.loss.detach()  # this loss leaves no logits to return

    causal.loss_function = loss
    causal.register_forward_hook(forget)


class _ChunkedLoss(torch.autograd.Function):
    """Allocations and products of the chunked loss. For traces: it needs no values."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        tokens, width = hidden.shape
        parts = -(-weight.shape[0] // width)
        chunk = 1 << (-(-tokens // parts) - 1).bit_length()  # the next power of two
        weight_gradient = torch.zeros_like(weight) if weight.requires_grad else None
        gradient = torch.zeros_like(hidden)
        losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
        for start in range(0, tokens, chunk):
            part = hidden[start : start + chunk]
            logits = part @ weight.t()
            dtype = logits.dtype
            logits = logits.float()  # one kernel then turns them into their gradient in place
            logits = logits.to(dtype)
            scaled = logits * losses[0]
            gradient[start : start + chunk] = scaled @ weight
            if weight_gradient is not None:
                # In place: the trace counts its memory, not its FLOPs (1 % of a 7B model's step).
                weight_gradient.addmm_(logits.t(), part)
        ctx.save_for_backward(gradient, weight_gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        gradient, weight_gradient = ctx.saved_tensors
        return gradient, weight_gradient, None
