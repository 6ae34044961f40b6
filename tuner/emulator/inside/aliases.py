"""CPU tensors over device memory, and what is known of the values in it.

Device memory is mapped host memory, so a CPU tensor can share the storage of a CUDA tensor: an
operator computed on such aliases reads and writes the device's memory, in place and without a copy.

What is known: integers and booleans always, unless something that was not computed wrote them;
floats where they are few (they are always written, computed or made up), and those of medium size
that were computed from known ones. The two exceptions are noted on the storage, where views share
the note and where it ends with the memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import empty

from tuner.emulator.inside.sparse import STRIDED, made_of, parts_of

CPU = torch.device("cpu")
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

# Floats up to this many are always written: computed where all inputs are known, made up otherwise.
SMALL = 4096
# Floats up to this many are computed where all inputs are known: masks, positions and their angles.
MEDIUM = 65_536
# Integers are computed up to this many elements. Bytes hold quantised weights and images, int32
# packed weights: those decide no shapes and are left alone.
LIMITS = {
    torch.bool: 1 << 24,
    torch.int64: 1 << 23,
    torch.int32: 1 << 22,
    torch.int16: 1 << 20,
    torch.uint8: 1 << 20,
    torch.int8: 1 << 20,
}

# Attribute of a storage: "known" floats, "unknown" integers, or booleans that are all "true" or all
# "false" and too many to write.
_NOTE = "tuner_values"
_UNWRITTEN = frozenset({"unknown", "true", "false"})
_construct = torch._C._construct_storage_from_data_pointer
_nothing: dict[torch.dtype, torch.Tensor] = {}


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a CUDA tensor; valid as long as that memory is."""
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
    """Whether the values of a CUDA tensor in memory are what the program computed."""
    if tensor.layout is not STRIDED:
        return all(map(is_known, parts_of(tensor)))
    dtype = tensor.dtype
    storage = tensor.untyped_storage()
    if dtype in FLOATS:
        if tensor.numel() <= SMALL and storage.nbytes() <= SMALL * dtype.itemsize:
            return True
        return tensor.numel() <= MEDIUM and getattr(storage, _NOTE, None) == "known"
    if tensor.numel() > LIMITS.get(dtype, 0):
        return False
    return getattr(storage, _NOTE, None) not in _UNWRITTEN


def note_known(tensor: torch.Tensor) -> None:
    """Notes that the floats of this storage are computed."""
    storage: Any = tensor.untyped_storage()
    storage.tuner_values = "known"


def note_unknown(tensor: torch.Tensor) -> None:
    """Notes that nobody computed the integers of this storage."""
    storage: Any = tensor.untyped_storage()
    storage.tuner_values = "unknown"


def note_uniform(tensor: torch.Tensor, *, value: bool) -> None:
    """Notes that all booleans of this storage have this value; memory does not have it."""
    storage: Any = tensor.untyped_storage()
    storage.tuner_values = "true" if value else "false"


def forget_note(tensor: torch.Tensor) -> None:
    """Takes back what was noted of this storage."""
    storage: Any = tensor.untyped_storage()
    if getattr(storage, _NOTE, None) is not None:
        storage.tuner_values = None


def noted(tensor: torch.Tensor) -> str | None:
    """What was noted of this tensor's storage: "known", "unknown", "true", "false" or None."""
    return getattr(tensor.untyped_storage(), _NOTE, None)


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether a write to this tensor writes all of its storage."""
    return tensor.numel() * tensor.dtype.itemsize >= tensor.untyped_storage().nbytes()
