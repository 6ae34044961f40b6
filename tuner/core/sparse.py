"""Safetensors files that are a header and a hole: names, shapes and types, and no weights.

A hole reads as zeros and takes no disk. Each file says in its header that it is hollow, so that
nobody takes it for weights. The format: 8 bytes with the length of the header, the header in
JSON, then the tensors' bytes (https://huggingface.co/docs/safetensors). Imports nothing heavy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.core.errors import UnavailableError

HOLLOW_KEY, HOLLOW_VALUE = "tuner", "hollow"
"""Mark of a hollow file in its header."""

SHARD_BYTES = 5_000_000_000
"""Size of a file of a large model, as on the hub."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_ALIGNMENT = 8
_LONGEST_HEADER_BYTES = 100_000_000  # what safetensors itself accepts
_PROBE_BYTES = 16 * 2**20

ELEMENT_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 8),
}
"""Bits of an element by the format's name of its type."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file: its name, the format's name of its type, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def size_bytes(self) -> int:
        """The size in a file."""
        return self.elements * ELEMENT_BITS[self.dtype] // 8


def write_shards(folder: Path, tensors: Sequence[TensorEntry]) -> list[Path]:
    """Write `tensors` into hollow files in `folder`, with an index where they are several.

    Returns the paths of the files. Raises `UnavailableError` where the file system has no holes.
    """
    _require_holes(folder)
    shards = _split(tensors)
    if len(shards) == 1:
        return [write_hollow(folder / SINGLE, shards[0])]
    paths = [
        write_hollow(folder / f"model-{number:05}-of-{len(shards):05}.safetensors", shard)
        for number, shard in enumerate(shards, 1)
    ]
    where = {t.name: path.name for path, shard in zip(paths, shards, strict=True) for t in shard}
    index = {
        "metadata": {"total_size": sum(tensor.size_bytes for tensor in tensors)},
        "weight_map": dict(sorted(where.items())),
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return paths


def _split(tensors: Iterable[TensorEntry]) -> list[list[TensorEntry]]:
    """The tensors in order, in groups of at most `SHARD_BYTES` (or of one larger tensor)."""
    shards: list[list[TensorEntry]] = [[]]
    used_bytes = 0
    for tensor in tensors:
        if shards[-1] and used_bytes + tensor.size_bytes > SHARD_BYTES:
            shards.append([])
            used_bytes = 0
        shards[-1].append(tensor)
        used_bytes += tensor.size_bytes
    return shards


def write_hollow(path: Path, tensors: Sequence[TensorEntry]) -> Path:
    """Write one hollow file of these tensors, and return its path."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt", HOLLOW_KEY: HOLLOW_VALUE}}
    end = 0
    # Wide types first, as safetensors writes them: so every tensor is aligned to its type.
    for tensor in sorted(tensors, key=lambda t: -ELEMENT_BITS[t.dtype]):
        start, end = end, end + tensor.size_bytes
        fields[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return path


def _require_holes(folder: Path) -> None:
    """Raise unless a file in `folder` can be longer than what it takes."""
    probe = folder / ".hole"
    try:
        with probe.open("wb") as file:
            file.truncate(_PROBE_BYTES)
        taken_bytes = disk_bytes([probe])
    finally:
        probe.unlink(missing_ok=True)
    if taken_bytes >= _PROBE_BYTES:
        raise UnavailableError(
            f"the file system of {str(folder.parent)!r} has no sparse files: a hollow checkpoint "
            "would take as much disk as the weights",
            hint="name a folder on another file system, such as ext4, xfs, btrfs or tmpfs",
        )


def disk_bytes(paths: Iterable[Path]) -> int:
    """The disk space of files, less than their length if they have holes."""
    return sum(512 * path.stat().st_blocks for path in paths)  # POSIX: blocks are of 512 bytes


def read_header(path: Path | str) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its tensors' bytes begin.

    Raises `ValueError` for what is no safetensors file, and `OSError`.
    """
    with Path(path).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(_LONGEST_HEADER_BYTES, os.fstat(file.fileno()).st_size):
            raise ValueError(f"{str(path)!r} is not a safetensors file")
        fields = json.loads(file.read(length))
    if not isinstance(fields, dict):
        raise ValueError(f"{str(path)!r} is not a safetensors file")
    return fields, 8 + length


def says_hollow(fields: Mapping[str, Any]) -> bool:
    """True if the header belongs to a file without weights."""
    metadata = fields.get("__metadata__")
    return isinstance(metadata, dict) and metadata.get(HOLLOW_KEY) == HOLLOW_VALUE


def is_hollow(path: Path | str) -> bool:
    """True if the file, or any safetensors file of the folder, is hollow."""
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return any(_is_hollow_file(file) for file in files)


def _is_hollow_file(path: Path) -> bool:
    try:
        return says_hollow(read_header(path)[0])
    except (OSError, ValueError):
        return False
