"""Notes on the values in device memory, attached to the storage that holds them.

Views share the note, and it ends with the memory. Without a note, memory holds the values of
integers and of up to `FEW` floats; more floats are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import empty, full

STRIDED = torch.strided
"""The layout of tensors with memory of their own."""


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that make up a sparse tensor, with its elements last."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def made_of(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """A sparse tensor with the size and layout of `like`, sharing the memory of `parts`."""
    if like.layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, like.shape, is_coalesced=like.is_coalesced(), check_invariants=False
        )
    first, second, values = parts
    return torch.sparse_compressed_tensor(
        first, second, values, like.shape, layout=like.layout, check_invariants=False
    )


WRITTEN, UNKNOWN, UNIFORM = "written", "unknown", "uniform"

AT_MOST = "at most"
"""Booleans that are true wherever they may be: a selection by them is as large as possible."""
ASSUMED = "assumed"
"""Choices among unknown floats that go round all candidates; unknown floats taken as finite."""
MADE_UP = "made up"
"""Values that are unknown and have no known bound."""
_ORDER: dict[str | None, int] = {None: 0, AT_MOST: 1, ASSUMED: 2, MADE_UP: 3}

FEW = 4096
"""Memory always holds the values of a storage with up to this many floats."""

NOTE = "tuner_values"
"""The attribute of a storage that holds its note."""


class Note(NamedTuple):
    """The state of one storage's values, and their origin.

    `state` is `WRITTEN` (memory holds them), `UNKNOWN`, or `UNIFORM` (all are `value`, of `dtype`,
    and memory does not hold them). `origin` is `AT_MOST`, `ASSUMED` or `MADE_UP`, or None for
    values that the program computed.
    """

    state: str
    value: Any = None
    dtype: torch.dtype | None = None
    origin: str | None = None


_KNOWN, _UNKNOWN = Note(WRITTEN), Note(UNKNOWN)


def noted(tensor: torch.Tensor) -> Note | None:
    """The note of this tensor's storage, if any; None for sparse tensors, which have no storage."""
    try:
        return getattr(tensor.untyped_storage(), NOTE, None)
    except NotImplementedError:
        return None


def origin_of(tensor: torch.Tensor) -> str | None:
    """The origin of this tensor's values; None for values that the program computed."""
    note = noted(tensor)
    return None if note is None else note.origin


def worst(one: str | None, other: str | None) -> str | None:
    """The origin of values that are computed from values of two origins."""
    return one if _ORDER[one] >= _ORDER[other] else other


def note_known(tensor: torch.Tensor) -> None:
    """Notes that the floats of this storage are in memory."""
    _set(tensor, _KNOWN)


def note_unknown(tensor: torch.Tensor) -> None:
    """Notes that the integers of this storage are unknown."""
    _set(tensor, _UNKNOWN)


def note_uniform(tensor: torch.Tensor, value: Any, origin: str | None = None) -> None:
    """Notes that all elements of this storage have this value, which is not in memory."""
    _set(tensor, Note(UNIFORM, value, tensor.dtype, origin))


def constant(tensor: torch.Tensor, note: Note) -> torch.Tensor | None:
    """The common value of all elements, as a CPU tensor; None if none is noted."""
    if note.state != UNIFORM or (note.dtype is not tensor.dtype and note.value):
        return None
    return full((), note.value, dtype=tensor.dtype)


def note_origin(tensor: torch.Tensor, origin: str | None) -> None:
    """Adds an origin of the values in memory; the worse of the old and the new one counts."""
    if origin is None:
        return
    note = noted(tensor)
    if note is None:
        size = tensor.untyped_storage().nbytes()
        if tensor.dtype.is_floating_point and size > FEW * tensor.dtype.itemsize:
            return  # part of many floats, which are unknown anyway
        note = _KNOWN
    if note.state != UNKNOWN:
        _set(tensor, note._replace(origin=worst(note.origin, origin)))


def forget_note(tensor: torch.Tensor) -> None:
    """Removes the note of this storage."""
    storage: Any = tensor.untyped_storage()
    if getattr(storage, NOTE, None) is not None:
        storage.tuner_values = None
        for tell in _followers:
            tell(storage._cdata, 0)


def covers_storage(tensor: torch.Tensor) -> bool:
    """True if a write to this tensor overwrites its whole storage."""
    return tensor.numel() * tensor.dtype.itemsize >= tensor.untyped_storage().nbytes()


def _set(tensor: torch.Tensor, note: Note) -> None:
    storage: Any = tensor.untyped_storage()
    storage.tuner_values = note
    for tell in _followers:
        tell(storage._cdata, 1)


_followers: list[Callable[[int, int], object]] = []


def follow_notes(tell: Callable[[int, int], object]) -> None:
    """Call `tell` with the address of each storage that gets a note, and 1, or 0 if it loses it."""
    _followers.append(tell)


CPU = torch.device("cpu")
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

# Floats up to this many are always written: computed where all inputs are known, made up otherwise.
SMALL = FEW
# Floats up to this many are computed where all inputs are known: masks, positions and their angles.
MEDIUM = 1 << 20
# Integers are computed up to this many elements. Larger tensors of bytes are quantised weights and
# images, of int32 packed weights: these decide no shapes and are left alone.
LIMITS = {
    torch.bool: 1 << 24,
    torch.int64: 1 << 23,
    torch.int32: 1 << 22,
    torch.int16: 1 << 20,
    torch.uint8: 1 << 20,
    torch.int8: 1 << 20,
}

_construct = torch._C._construct_storage_from_data_pointer
_nothing: dict[torch.dtype, torch.Tensor] = {}


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a CUDA tensor, valid as long as that memory."""
    if tensor.layout is not STRIDED:
        return made_of([alias(part) for part in parts_of(tensor)], tensor)
    dtype = tensor.dtype
    nothing = _nothing.get(dtype)
    if nothing is None:
        nothing = _nothing[dtype] = empty(0, dtype=dtype)
    count = tensor.numel()
    if count == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    shape, stride = tensor.shape, tensor.stride()
    if not tensor.is_contiguous():
        count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    storage = _construct(tensor.data_ptr(), CPU, count * dtype.itemsize)
    return nothing.detach().set_(storage, 0, shape, stride)


def is_known(tensor: torch.Tensor) -> bool:
    """True if memory holds the values of this CUDA tensor."""
    if tensor.layout is not STRIDED:
        return all(map(is_known, parts_of(tensor)))
    dtype = tensor.dtype
    storage = tensor.untyped_storage()
    note = getattr(storage, NOTE, None)
    if dtype in FLOATS:
        if tensor.numel() <= SMALL and storage.nbytes() <= SMALL * dtype.itemsize:
            return True
        return note is not None and note.state == WRITTEN and tensor.numel() <= MEDIUM
    if tensor.numel() > LIMITS.get(dtype, 0):
        return False
    return note is None or note.state == WRITTEN
