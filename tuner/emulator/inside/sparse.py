"""Sparse tensors: what they are made of, and the same on the CPU.

Where the elements of a sparse tensor are is a matter of integers, which are known; what they are is
known as of any other tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

STRIDED = torch.strided
"""The layout of tensors with memory of their own."""


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with memory that a sparse tensor is made of, its elements last."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def made_of(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of the size and layout of `like`, which shares the memory of `parts`."""
    if like.layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices,
            values,
            like.shape,
            is_coalesced=like.is_coalesced(),
            check_invariants=False,
        )
    first, second, values = parts
    return torch.sparse_compressed_tensor(
        first, second, values, like.shape, layout=like.layout, check_invariants=False
    )
