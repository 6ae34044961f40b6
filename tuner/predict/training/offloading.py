"""Activations on the host between a forward and its backward pass, as traces have them.

Read from torchtune 0.6.1, training/_activation_offloading.py (`OffloadActivations`, with streams).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

_LEAST_BYTES = 1024
"""`min_offload_size`: smaller tensors stay."""

_STASHED = 5
"""`max_fwd_stash_size`: tensors whose copies to the host may be under way; the last ones stay."""


@dataclass(slots=True, eq=False)
class _Held:
    """A tensor by its layout; it is on the device while its copy is under way."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stashed: torch.Tensor | None


class OffloadedShapes(saved_tensors_hooks):
    """Frees what a forward pass saves, and allocates it again in the backward pass.

    For tensors without data. One training has one of it, for all its forward passes.
    """

    def __init__(self, model: Any) -> None:
        self._stash: deque[_Held] = deque()
        self._own = {tensor.untyped_storage()._cdata for tensor in model.parameters()}
        self._words = model.get_input_embeddings().weight.shape[0]
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        # The loss and the output head are outside, in torchtune's recipes.
        is_own = tensor.untyped_storage()._cdata in self._own
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self._words
        if is_own or is_logits or not tensor.is_floating_point() or tensor.nbytes < _LEAST_BYTES:
            return tensor
        held = _Held(tensor.size(), tensor.stride(), tensor.dtype, tensor.device, tensor)
        self._stash.append(held)
        if len(self._stash) > _STASHED:
            self._stash.popleft().stashed = None
        return held

    def _unpack(self, held: Any) -> torch.Tensor:
        if isinstance(held, torch.Tensor):
            return held
        found: torch.Tensor | None = held.stashed
        if found is None:
            found = torch.empty_strided(
                held.size, held.stride, dtype=held.dtype, device=held.device
            )
        held.stashed = None
        return found
