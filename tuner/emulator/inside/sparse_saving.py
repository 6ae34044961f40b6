"""Checkpoints of weights that are made up take no room on the disk: zeros are holes."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from tuner.core.sparse import TensorEntry, write_hollow
from tuner.emulator.inside.hollow import DTYPES
from tuner.emulator.inside.process import when_imported

LARGE_BYTES = 64 << 20
"""Files of tensors of more bytes are written without them."""


def save_sparsely() -> None:
    """Save tensors without their zeros from now on."""
    when_imported("torch.serialization", _save_here)
    when_imported("safetensors.torch", _save_tensors_here)


def _save_here(module: Any) -> None:
    import torch

    save = module.save

    @functools.wraps(save)
    def save_here(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, str | os.PathLike):
            return save(obj, f, *args, **kwargs)
        with _SparseFile(os.fspath(f)) as file:
            return save(obj, file, *args, **kwargs)

    module.save = torch.save = save_here


def _save_tensors_here(module: Any) -> None:
    write = module.serialize_file

    @functools.wraps(write)
    def write_here(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        entries = [_entry(name, one) for name, one in tensors.items()]
        large = sum(entry.size_bytes for entry in entries if entry) > LARGE_BYTES
        if large and all(entries):
            return write_hollow(Path(filename), list(filter(None, entries)))
        return write(tensors, filename, *args, **kwargs)

    module.serialize_file = write_here


class _SparseFile:
    """A file to write whose zeros take no disk: weights that were never written are zeros."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("wb")  # noqa: SIM115 - closed by `__exit__`

    def __enter__(self) -> _SparseFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.truncate(self._file.tell())
        self._file.close()

    def write(self, content: Any) -> int:
        """Write bytes, or leave a hole for zeros."""
        size = len(content)
        if size > _PAGE_BYTES and bytes(content[:_PAGE_BYTES]) == _PAGE and _is_zero(content):
            self._file.seek(size, os.SEEK_CUR)
            return size
        return self._file.write(content)

    def flush(self) -> None:
        """Write what is buffered."""
        self._file.flush()


_PAGE_BYTES = 4096
_PAGE = bytes(_PAGE_BYTES)


def _is_zero(content: Any) -> bool:
    """True if all bytes are zero: the same as a page further on, and the first page is."""
    view = memoryview(content).cast("B")
    return view[:-_PAGE_BYTES] == view[_PAGE_BYTES:]


def _entry(name: str, tensor: Any) -> TensorEntry | None:
    """A tensor as safetensors writes it; None for a type that hollow files have not."""
    given: Any = tensor.get if isinstance(tensor, dict) else functools.partial(getattr, tensor)
    dtype = {long: short for short, long in DTYPES.items()}.get(str(given("dtype")))
    return None if dtype is None else TensorEntry(name, dtype, tuple(given("shape")))
