"""Hollow checkpoints (without weights) in an emulated program: tensors of zeros without memory.

safetensors maps a file, and each tensor made from it touches the mapping: on Linux, read-ahead then
fills the page cache with megabytes of zeros per tensor. Files marked as hollow
(tuner/core/sparse.py) are not mapped here. Their tensors lie in memory that was never written,
which reads as zeros and takes no pages. Such a tensor is called a hole. Operators that only move
or convert holes on the host return holes, so that 16 GB of bfloat16 become 32 GB of float32 at no
cost. So does quantisation: zeros have a scale of zero, and with it any code means zero. Large
floats that come back from the device, where they were never written, are holes too.

safetensors itself opens all other files.

Checkpoints that the program saves take no room on the disk either: zeros are holes.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from tuner.core.sparse import TensorEntry, read_header, says_hollow, write_hollow
from tuner.emulator.inside.host_memory import note_memory
from tuner.emulator.inside.notes import FLOATS
from tuner.emulator.inside.process import replaces, when_imported
from tuner.emulator.inside.transfers import FRESH_BYTES

if TYPE_CHECKING:
    from tuner.emulator.inside.values import Values


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

LARGE_BYTES = 1 << 20
"""Results of fewer bytes are computed as usual, and are copied to the device with values."""

# Operators that only move, convert or quantise their floats.
MOVING = frozenset({
    "aten::_to_copy", "aten::clone", "aten::cat", "aten::stack", "aten::contiguous",
    "aten::_pin_memory", "bitsandbytes::quantize_4bit", "bitsandbytes::quantize_blockwise",
})  # fmt: skip

_NOTE = "tuner_hollow"  # attribute of a storage that was never written

# Linux: pages are not reserved (mman.h; Python has no name for it before 3.13).
_NO_RESERVE = 0x4000

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""PyTorch's name of an element type by that of safetensors."""


def install(values: Values) -> None:
    """Have safetensors, once imported, read hollow files as holes, and keep holes as holes."""
    when_imported("safetensors", _replace)
    handler_of = values.handler
    values.handler = lambda func: moving(func, handler_of(func))  # type: ignore[method-assign]


def _replace(module: ModuleType) -> None:
    ours = _reader(module.safe_open)
    for other in list(sys.modules.values()):
        if vars(other).get("safe_open") is module.safe_open and other is not module:
            other.safe_open = ours  # type: ignore[attr-defined]
    module.safe_open = ours  # type: ignore[attr-defined]


def _reader(real: Any) -> type:
    class safe_open:  # noqa: N801 - the name that it has in safetensors
        """Opens a file with safetensors, or as a `_HollowFile` if it is hollow."""

        def __new__(cls, filename: Any, framework: str, *args: Any, **kwargs: Any) -> Any:
            """The opened file `filename`."""
            found = _header(filename) if framework in {"pt", "pytorch", "torch"} else None
            if found is None:
                return real(filename, framework, *args, **kwargs)
            device = args[0] if args else kwargs.get("device", "cpu")
            return _HollowFile(*found, device)

    return safe_open


def _header(filename: Any) -> tuple[dict[str, Any], int] | None:
    """Header and start of the tensors of a hollow file; None for other or broken files."""
    try:
        fields, start = read_header(filename)
    except (OSError, ValueError, TypeError):
        return None  # safetensors reports the problem
    return (fields, start) if says_hollow(fields) else None


class _HollowFile:
    """A hollow file, with the interface of safetensors' `safe_open`."""

    def __init__(self, fields: dict[str, Any], start: int, device: Any) -> None:
        self._metadata: dict[str, str] | None = fields.pop("__metadata__", None)
        self._fields = fields
        self._device = device
        end = max((field["data_offsets"][1] for field in fields.values()), default=0)
        self._memory: mmap.mmap | None = _untouched(max(end, 1))

    def __enter__(self) -> _HollowFile:
        """The file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the file; its tensors remain valid."""
        self._memory = None

    def keys(self) -> list[str]:
        """The names of the tensors, sorted."""
        self._opened()
        return sorted(self._fields)

    def offset_keys(self) -> list[str]:
        """The names of the tensors, in their order in the file."""
        self._opened()
        return sorted(self._fields, key=lambda name: self._fields[name]["data_offsets"])

    def metadata(self) -> dict[str, str] | None:
        """The metadata in the file's header."""
        self._opened()
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor of zeros."""
        field = self._field(name)
        begin, _ = field["data_offsets"]
        tensor = _over(self._opened(), begin, field["shape"], field["dtype"])
        if str(self._device) == "cpu":
            return tensor
        is_number = isinstance(self._device, int)  # of a CUDA device
        return tensor.to(f"cuda:{self._device}" if is_number else self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_slice(self, name: str) -> _HollowSlice:
        """A tensor that is created when it is indexed."""
        return _HollowSlice(self, name, self._field(name))

    def _opened(self) -> mmap.mmap:
        if self._memory is None:
            raise _error("File is closed")
        return self._memory

    def _field(self, name: str) -> dict[str, Any]:
        self._opened()
        if name not in self._fields:
            raise _error(f"File does not contain tensor {name}")
        field: dict[str, Any] = self._fields[name]
        return field


class _HollowSlice:
    """A tensor of a hollow file, with the interface of safetensors' `get_slice`."""

    def __init__(self, file: _HollowFile, name: str, field: dict[str, Any]) -> None:
        self._file, self._name, self._field = file, name, field

    def get_shape(self) -> list[int]:
        """The shape of the tensor."""
        return list(self._field["shape"])

    def get_dtype(self) -> str:
        """The element type, by its name in the format."""
        return str(self._field["dtype"])

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The part of the tensor at `index`."""
        return self._file.get_tensor(self._name)[index]


def moving(operator: Any, handler: Handler | None) -> Handler | None:
    """`handler` of an operator, or its replacement if the operator may read holes."""
    if getattr(operator, "_schema", None) is None:
        return handler
    if operator._schema.name == "aten::zeros_like":
        return _zeros(handler)
    if operator._schema.name not in MOVING:
        return handler

    def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sources = args[0] if isinstance(args[0], list | tuple) else args[:1]
        if sources and sources[0].is_cpu:
            out = _moved(operator, args, kwargs, sources)
            if out is not None:
                return out
        out = func(*args, **kwargs) if handler is None else handler(func, args, kwargs)
        is_copy = sources and sources[0].is_cuda and isinstance(out, torch.Tensor) and out.is_cpu
        if is_copy and out.dtype in FLOATS and out.nbytes > FRESH_BYTES:
            setattr(out.untyped_storage(), _NOTE, True)  # memory that was never written
        return out

    return call


def _zeros(handler: Handler | None) -> Handler:
    """Make large zeros on the host from fresh memory, as for gradients that FSDP offloads."""

    def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device") or args[0].device
        if device.type == "cpu" and args[0].nbytes > FRESH_BYTES and not kwargs.get("pin_memory"):
            out = torch.empty_like(*args, **kwargs)
            if out.nbytes > FRESH_BYTES:
                setattr(out.untyped_storage(), _NOTE, True)
                return out
        return func(*args, **kwargs) if handler is None else handler(func, args, kwargs)

    return call


def _moved(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sources: Sequence[torch.Tensor]
) -> Any:
    """The results, as holes, of an operator that only reads holes; None for other calls."""
    device = kwargs.get("device")
    if not all(source.is_cpu and is_hole(source) for source in sources):
        return None
    if (device is not None and device.type != "cpu") or kwargs.get("pin_memory"):
        return None
    if func._schema.name == "aten::_pin_memory":
        if sources[0].nbytes < LARGE_BYTES or not sources[0].is_contiguous():
            return None
        out = torch.empty(sources[0].shape, dtype=sources[0].dtype, pin_memory=True)
        setattr(out.untyped_storage(), _NOTE, True)
        return out
    # The operator itself finds the sizes, strides and type on tensors without memory.
    with torch._C._DisableTorchDispatch():
        like = func(
            *_on_meta(args), **{**_on_meta(kwargs), **({"device": "meta"} if device else {})}
        )
    outs = like if isinstance(like, tuple) else (like,)
    if outs[0].nbytes < LARGE_BYTES or not all(out.is_contiguous() for out in outs):
        return None
    holes = tuple(hole(out.shape, out.dtype) for out in outs)
    return holes if isinstance(like, tuple) else holes[0]


def _on_meta(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_on_meta(one) for one in value)
    return value.to("meta") if hasattr(value, "is_meta") else value


def hole(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of zeros that takes no memory until it is written."""
    size = 1
    for one in shape:
        size *= one
    memory = _untouched(max(size * dtype.itemsize, 1))
    note_memory(memory)
    return _over(memory, 0, shape, dtype)


def is_hole(tensor: torch.Tensor) -> bool:
    """True if a CPU tensor is part of a hole, even one that has been written since."""
    if str(tensor.layout) != "torch.strided":  # a sparse tensor has no storage of its own
        return False
    return getattr(tensor.untyped_storage(), _NOTE, False) is True


def _untouched(size_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return mmap.mmap(-1, size_bytes, flags=flags)


def _over(memory: mmap.mmap, start: int, shape: Any, kind: str | torch.dtype) -> torch.Tensor:
    """A tensor over a part of `memory`, which it keeps alive."""
    dtype = getattr(torch, DTYPES[kind]) if isinstance(kind, str) else kind
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
    setattr(flat.untyped_storage(), _NOTE, True)
    return flat.view(dtype).view(tuple(shape))


def _error(text: str) -> Exception:
    from safetensors import SafetensorError

    error: Exception = SafetensorError(text)
    return error


LARGE_FILE_BYTES = 64 << 20
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
    @replaces(module, "serialize_file")
    def write_here(write: Any, tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        entries = [_entry(name, one) for name, one in tensors.items()]
        large = sum(entry.size_bytes for entry in entries if entry) > LARGE_FILE_BYTES
        if large and all(entries):
            return write_hollow(Path(filename), list(filter(None, entries)))
        return write(tensors, filename, *args, **kwargs)


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
