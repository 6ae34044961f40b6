"""CPU tensors over device memory, and what is known of the values in it.

Device memory is mapped host memory, so a CPU tensor can share the storage of a CUDA tensor: an
operator computed on such aliases reads and writes the device's memory, in place and without a copy.

What is known: integers and booleans always, unless something that was not computed wrote them;
floats where they are few (they are always written, computed or made up), and those of medium size
that were computed from known ones. The exceptions are noted on the storage (notes.py).
"""

from __future__ import annotations

import torch
from torch import empty

from tuner.emulator.inside.notes import FEW, NOTE, WRITTEN
from tuner.emulator.inside.sparse import STRIDED, made_of, parts_of

CPU = torch.device("cpu")
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

# Floats up to this many are always written: computed where all inputs are known, made up otherwise.
SMALL = FEW
# Floats up to this many are computed where all inputs are known: masks, positions and their angles.
MEDIUM = 1 << 20
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
    note = getattr(storage, NOTE, None)
    if dtype in FLOATS:
        if tensor.numel() <= SMALL and storage.nbytes() <= SMALL * dtype.itemsize:
            return True
        return note is not None and note.state == WRITTEN and tensor.numel() <= MEDIUM
    if tensor.numel() > LIMITS.get(dtype, 0):
        return False
    return note is None or note.state == WRITTEN
