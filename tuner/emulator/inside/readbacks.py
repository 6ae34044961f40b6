"""Operators that read a count back from the device before they know the size of their output.

The real operator runs, with the temporaries that its release of PyTorch takes; the stand-in runtime
gives it the counts (device/answers.c), which are computed here from the integers in device memory.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch

from tuner.emulator.inside.aliases import FLOATS, alias, is_known
from tuner.emulator.inside.made_up import NOISE_LIMIT, MadeUp

Count = tuple[int, int]  # a value, and how many bytes of it are read back
_MASKS = frozenset({torch.bool, torch.uint8})
_FORMATS = {1: "b", 2: "h", 4: "i", 8: "q"}


class UnreadableError(Exception):
    """A count depends on values that nobody computed."""


class Readbacks:
    """Counts for the operators that ask the device for them."""

    def __init__(self, made_up: MadeUp) -> None:
        self._made_up = made_up
        library = ctypes.CDLL(None)
        self._answer = library.emu_answer
        self._answer.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._forget = library.emu_forget_answers

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], counts: list[Count]
    ) -> Any:
        """What `func` returns when its reads from the device find `counts`, in this order."""
        for value, size in counts:
            self._answer(struct.pack(_FORMATS[size], value), size)
        try:
            return func(*args, **kwargs)
        finally:
            self._forget()

    def counts(self) -> dict[str, Callable[..., list[Count]]]:
        """By operator's name: the counts that it reads, from its arguments."""
        return {
            "aten::nonzero": self._nonzero,
            "aten::index.Tensor": self._masks,
            "aten::_unsafe_index.Tensor": self._masks,
            "aten::index_put": self._masks_put,
            "aten::index_put_": self._masks_put,
            "aten::_unsafe_index_put": self._masks_put,
            "aten::_index_put_impl_": self._masks_put,
            "aten::masked_select": self._selected,
            "aten::masked_scatter_backward": self._selected,
            "aten::repeat_interleave.Tensor": self._repeats,
            "aten::_unique2": self._distinct,
            "aten::unique_consecutive": self._distinct_runs,
            "aten::unique_dim": self._distinct_slices,
            "aten::unique_dim_consecutive": self._distinct_runs_of_slices,
            "aten::bincount": self._bins,
            "aten::_coalesce": self._distinct_places,
            "aten::_to_sparse": self._nonzero,
            "aten::_to_sparse_csr": self._nonzero,
            "aten::_to_sparse_csc": self._nonzero,
            "aten::multinomial": self._valid,
            "aten::_linalg_svd": self._no_errors,
            "aten::_linalg_eigh": self._no_errors,
            "aten::linalg_eig": self._finite,
            "aten::_linalg_check_errors": self._no_errors,
        }

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor
        if is_known(tensor):
            return alias(tensor)
        if tensor.dtype in FLOATS and tensor.numel() <= NOISE_LIMIT:
            return self._made_up.noise(tensor)
        raise UnreadableError

    def _distinct_places(self, source: torch.Tensor) -> list[Count]:
        indices = source._indices()
        if not is_known(indices):
            raise UnreadableError
        return _either(torch.unique(alias(indices), dim=1).shape[1])

    def _nonzero(self, source: torch.Tensor, **_: Any) -> list[Count]:
        if source.dtype in FLOATS and not is_known(source):
            raise UnreadableError
        return [(int(self._read(source).count_nonzero()), 4)]

    def _masks(self, source: torch.Tensor, indices: list[torch.Tensor | None]) -> list[Count]:
        return [
            (int(self._read(index).count_nonzero()), 4)
            for index in indices
            if index is not None and index.dtype in _MASKS and index.is_cuda
        ]

    def _masks_put(
        self,
        source: torch.Tensor,
        indices: list[torch.Tensor | None],
        values: torch.Tensor,
        accumulate: bool = False,
        unsafe: bool = False,
    ) -> list[Count]:
        counts = self._masks(source, indices)
        if accumulate and not unsafe:
            # It looks whether the largest and the smallest index are in range: they are.
            expanded = sum(
                (index.dim() if index.dtype in _MASKS else 1)
                for index in indices
                if index is not None
            )
            counts += [(0, 8)] * (2 * expanded)
        return counts

    def _selected(self, source: torch.Tensor, mask: torch.Tensor, *_: Any) -> list[Count]:
        shape = torch.broadcast_shapes(source.shape, mask.shape)  # type: ignore[no-untyped-call]
        read = self._read(mask)
        repeated = 1
        for size in shape:
            repeated *= size
        return [(int(read.count_nonzero()) * (repeated // max(read.numel(), 1)), 4)]

    def _repeats(self, repeats: torch.Tensor, output_size: int | None = None) -> list[Count]:
        if output_size is not None:
            return []
        return [(int(self._read(repeats).sum()), 8), (1, 1)]  # and none is negative

    def _distinct(self, source: torch.Tensor, *_: Any, **__: Any) -> list[Count]:
        read = self._read(source)
        if source.dtype is torch.bool:
            return [(int(read.count_nonzero()), 4)]
        return [(torch.unique(read).numel(), 8)]

    def _distinct_runs(
        self,
        source: torch.Tensor,
        _inverse: bool = False,
        _counts: bool = False,
        dim: int | None = None,
    ) -> list[Count]:
        runs = torch.unique_consecutive(self._read(source), dim=dim)
        return _either(runs.shape[dim or 0])

    def _distinct_slices(self, source: torch.Tensor, dim: int, *_: Any, **__: Any) -> list[Count]:
        return _either(torch.unique(self._read(source), dim=dim).shape[dim])

    def _distinct_runs_of_slices(
        self, source: torch.Tensor, dim: int, *_: Any, **__: Any
    ) -> list[Count]:
        return _either(torch.unique_consecutive(self._read(source), dim=dim).shape[dim])

    def _bins(self, source: torch.Tensor, *_: Any, **__: Any) -> list[Count]:
        if source.numel() == 0:
            return []
        read = self._read(source)
        size = source.dtype.itemsize
        return [(int(read.min()), size), (int(read.max()), size)]

    def _valid(
        self, source: torch.Tensor, samples: int, replacement: bool = False, **_: Any
    ) -> list[Count]:
        """The probabilities are valid, and no row is all zeros."""
        return [(1, 1), (0, 1 if source.dim() == 1 else 8)]

    def _no_errors(self, *_: Any, **__: Any) -> list[Count]:
        """No matrix of the batch is singular, and every iteration converged."""
        return [(0, 1)]

    def _finite(self, *_: Any, **__: Any) -> list[Count]:
        """All elements are finite; then as `_no_errors`."""
        return [(1, 1), (0, 1)]


def _either(count: int) -> list[Count]:
    """A count that releases of PyTorch read at different widths."""
    return [(count, 8), (count, 4)]
