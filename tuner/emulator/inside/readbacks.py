"""Reads values back from the device, and computes the counts that operators read.

All copies from device to host are checked: a compiled operator may read a count that it needs.
Emulated kernels write nothing, so such an operator would read an arbitrary number. The stand-in
runtime asks here before each copy (device/answers.c). Copies by PyTorch's own transfers and known
values are allowed; any other copy ends the emulation with the operator's name.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import struct
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import empty

from tuner.cost.operators.operators import tensors_in
from tuner.emulator.inside.failing import send
from tuner.emulator.inside.lines import Unknowns, frames_of, package_of, places
from tuner.emulator.inside.made_up import NOISE_LIMIT, MadeUp, draw, seed_of
from tuner.emulator.inside.notes import (
    AT_MOST,
    CPU,
    FLOATS,
    MADE_UP,
    STRIDED,
    alias,
    constant,
    is_known,
    made_of,
    noted,
    origin_of,
    parts_of,
    worst,
)
from tuner.emulator.inside.operators import Operator


class Reading:
    """The arguments of a call as CPU tensors: aliases of known values, noise for unknown floats."""

    __slots__ = ("guessed", "is_bounded", "made_up", "origin", "seen", "unknown")

    def __init__(self, made_up: MadeUp | None) -> None:
        self.made_up = made_up  # None: unknown floats get no noise
        self.guessed = False  # True once noise replaces some floats
        self.seen: list[int] = []  # addresses of the tensors that noise replaces
        self.unknown = False  # True once a value is neither known nor replaced
        self.origin: str | None = None  # the worst origin of the values that were read
        self.is_bounded = False  # True once one of them is at most

    def value(self, value: Any) -> Any:
        """The argument for the CPU operator in place of `value`."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        kind = type(value)
        if kind is list or kind is tuple:
            if value and not isinstance(value[0], int | float):
                return kind([self.value(one) for one in value])
        elif kind is torch.device:
            return CPU
        return value

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The CPU tensor for a CUDA tensor; other tensors are returned as they are."""
        if not tensor.is_cuda:
            return tensor
        if tensor.layout is not STRIDED:
            parts = [self.tensor(part) for part in parts_of(tensor)]
            return tensor if self.unknown else made_of(parts, tensor)
        note = noted(tensor)
        if note is not None and note.origin is not None:
            self.origin = worst(self.origin, note.origin)
            self.is_bounded |= note.origin == AT_MOST
        if is_known(tensor):
            return alias(tensor)
        one = None if note is None else constant(tensor, note)
        if one is not None:
            return one.expand(tensor.shape)
        if tensor.dtype in FLOATS and self.made_up is not None and tensor.numel() <= NOISE_LIMIT:
            self.guessed = True
            self.origin = MADE_UP
            address = tensor.data_ptr()
            if address not in self.seen:
                self.seen.append(address)
            return self.made_up.noise(tensor, self.seen.index(address))
        self.unknown = True
        return tensor

    def positional(self, operator: Operator, args: tuple[Any, ...]) -> list[Any]:
        """CPU values of positional arguments, up to the first unknown one."""
        values: list[Any] = []
        for position, value in enumerate(args):
            if self.unknown:
                break
            if position == 0 and operator.is_like:
                values.append(empty((), dtype=value.dtype).expand(value.shape))
            else:
                values.append(self.value(value))
        return values

    def named(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """CPU values of keyword arguments."""
        if not kwargs or self.unknown:
            return {}
        return {name: self.value(value) for name, value in kwargs.items() if name != "pin_memory"}


def compute(
    operator: Operator, args: list[Any], kwargs: dict[str, Any], device: torch.device
) -> Any:
    """The operator's result for CPU arguments; its exceptions pass through."""
    if not operator.is_random:
        return operator.func(*args, **kwargs)
    generator = kwargs.pop("generator", None)
    seed = seed_of(generator, device)
    return draw(operator.func, args, kwargs, seed=seed, takes_generator=operator.takes_generator)


def mend(result: torch.Tensor, inputs: list[Any]) -> None:
    """Replaces non-finite results of finite inputs by finite values: the inputs may be made up."""
    if result.numel() == 0 or math.isfinite(float(result.sum(dtype=torch.float32))):
        return
    if all(_is_finite(one) for one in inputs):
        torch.nan_to_num_(result, nan=1.0, posinf=1.0, neginf=-1.0)


def _is_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value.layout is not STRIDED:
            return all(map(_is_finite, parts_of(value)))
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return all(_is_finite(one) for one in value)
    return True


Count = tuple[int, int]  # a value, and the number of its bytes that are read back
_MASKS = frozenset({torch.bool, torch.uint8})
_FORMATS = {1: "b", 2: "h", 4: "i", 8: "q"}


UNREADABLE: list[Count] = [(0, 4), (0, 8), (1, 1)]


class _UnreadableError(Exception):
    """A count depends on values that are not known."""


class Readbacks:
    """Answers the reads of operators that read counts from the device."""

    def __init__(self, made_up: MadeUp) -> None:
        self._made_up = made_up
        library = ctypes.CDLL(None)
        self._answer = library.emu_answer
        self._answer.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._forget = library.emu_forget_answers

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], counts: list[Count]
    ) -> Any:
        """The result of `func` when its reads from the device return `counts`, in this order."""
        for value, size in counts:
            self._answer(struct.pack(_FORMATS[size], value), size)
        try:
            return func(*args, **kwargs)
        finally:
            self._forget()

    def counted(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Count], str | None]:
        """The counts that an operator of `COUNTED` reads, and their origin.

        Counts by unknown values are the largest possible ones, if there is a bound.
        """
        reading = _Counting(self._made_up)
        try:
            counts = COUNTED[operator.full_name](reading, *args, **kwargs)
        except _UnreadableError:
            return UNREADABLE, MADE_UP
        return counts, reading.origin


class _Counting:
    """Computes the counts of one call; `origin` is the worst origin of the values read."""

    def __init__(self, made_up: MadeUp) -> None:
        self._made_up = made_up
        self.origin: str | None = None

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor, on the CPU. Raises `_UnreadableError` if they are unknown."""
        note = noted(tensor)
        if note is not None:
            self.origin = worst(self.origin, note.origin)
        if not tensor.is_cuda:
            return tensor
        if is_known(tensor):
            return alias(tensor)
        one = None if note is None else constant(tensor, note)
        if one is not None:
            return one.expand(tensor.shape)
        if tensor.dtype in FLOATS and tensor.numel() <= NOISE_LIMIT:
            self.origin = MADE_UP
            return self._made_up.noise(tensor)
        raise _UnreadableError

    def _true(self, mask: torch.Tensor) -> int:
        """The number of elements that are, or may be, nonzero."""
        note = noted(mask)
        one = None if note is None else constant(mask, note)
        if mask.dtype in FLOATS and (not is_known(mask) or origin_of(mask)) and one is None:
            self.origin = worst(self.origin, AT_MOST)
            return mask.numel()
        try:
            read = self._read(mask)
        except _UnreadableError:
            self.origin = worst(self.origin, AT_MOST)
            return mask.numel()
        return int(read.count_nonzero()) if one is None else mask.numel() * bool(one)

    def distinct_places(self, source: torch.Tensor) -> list[Count]:
        indices = source._indices()
        if not is_known(indices):
            raise _UnreadableError
        return _either(torch.unique(alias(indices), dim=1).shape[1])

    def nonzero(self, source: torch.Tensor, **_: Any) -> list[Count]:
        return [(self._true(source), 4)]

    def masks(self, source: torch.Tensor, indices: list[torch.Tensor | None]) -> list[Count]:
        counts = []
        for index in indices:
            if index is not None and index.dtype in _MASKS:
                if index.is_cuda:
                    counts.append((self._true(index), 4))
                else:  # counted on the host
                    self.origin = worst(self.origin, origin_of(index))
        return counts

    def masks_put(
        self,
        source: torch.Tensor,
        indices: list[torch.Tensor | None],
        values: torch.Tensor,
        accumulate: bool = False,
        unsafe: bool = False,
    ) -> list[Count]:
        counts = self.masks(source, indices)
        if accumulate and not unsafe:
            # The operator checks the range of the largest and the smallest index: both are valid.
            expanded = sum(
                (index.dim() if index.dtype in _MASKS else 1)
                for index in indices
                if index is not None
            )
            counts += [(0, 8)] * (2 * expanded)
        return counts

    def selected(self, source: torch.Tensor, mask: torch.Tensor, *_: Any) -> list[Count]:
        shape = torch.broadcast_shapes(source.shape, mask.shape)  # type: ignore[no-untyped-call]
        repeated = math.prod(shape) // max(mask.numel(), 1)
        return [(self._true(mask) * repeated, 4)]

    def repeats(self, repeats: torch.Tensor, output_size: int | None = None) -> list[Count]:
        if output_size is not None:
            return []
        return [(int(self._read(repeats).sum()), 8), (1, 1)]  # no repeat is negative

    def distinct(self, source: torch.Tensor, *_: Any, **__: Any) -> list[Count]:
        if source.dtype is torch.bool:
            return [(self._true(source), 4)]
        return [(torch.unique(self._read(source)).numel(), 8)]

    def distinct_runs(
        self,
        source: torch.Tensor,
        _inverse: bool = False,
        _counts: bool = False,
        dim: int | None = None,
    ) -> list[Count]:
        runs = torch.unique_consecutive(self._read(source), dim=dim)
        return _either(runs.shape[dim or 0])

    def distinct_slices(self, source: torch.Tensor, dim: int, *_: Any, **__: Any) -> list[Count]:
        return _either(torch.unique(self._read(source), dim=dim).shape[dim])

    def distinct_runs_of_slices(
        self, source: torch.Tensor, dim: int, *_: Any, **__: Any
    ) -> list[Count]:
        return _either(torch.unique_consecutive(self._read(source), dim=dim).shape[dim])

    def bins(self, source: torch.Tensor, *_: Any, **__: Any) -> list[Count]:
        if source.numel() == 0:
            return []
        read = self._read(source)
        size = source.dtype.itemsize
        return [(int(read.min()), size), (int(read.max()), size)]

    def valid(
        self, source: torch.Tensor, samples: int, replacement: bool = False, **_: Any
    ) -> list[Count]:
        """Answers that the probabilities are valid and no row is all zeros."""
        return [(1, 1), (0, 1 if source.dim() == 1 else 8)]

    def no_errors(self, *_: Any, **__: Any) -> list[Count]:
        """Answers that no matrix is singular and every iteration converged."""
        return [(0, 1)]


COUNTED: dict[str, Callable[..., list[Count]]] = {
    "aten::nonzero": _Counting.nonzero,
    "aten::index.Tensor": _Counting.masks,
    "aten::_unsafe_index.Tensor": _Counting.masks,
    "aten::index_put": _Counting.masks_put,
    "aten::index_put_": _Counting.masks_put,
    "aten::_unsafe_index_put": _Counting.masks_put,
    "aten::_index_put_impl_": _Counting.masks_put,
    "aten::masked_select": _Counting.selected,
    "aten::masked_scatter_backward": _Counting.selected,
    "aten::repeat_interleave.Tensor": _Counting.repeats,
    "aten::_unique": _Counting.distinct,
    "aten::_unique2": _Counting.distinct,
    "aten::unique_consecutive": _Counting.distinct_runs,
    "aten::unique_dim": _Counting.distinct_slices,
    "aten::unique_dim_consecutive": _Counting.distinct_runs_of_slices,
    "aten::bincount": _Counting.bins,
    "aten::_coalesce": _Counting.distinct_places,
    "aten::_to_sparse": _Counting.nonzero,
    "aten::_to_sparse_csr": _Counting.nonzero,
    "aten::_to_sparse_csc": _Counting.nonzero,
    "aten::multinomial": _Counting.valid,
    "aten::_linalg_check_errors": _Counting.no_errors,
}
"""The method that finds an operator's counts from its arguments, by the operator's name."""


def _either(count: int) -> list[Count]:
    """A count that PyTorch releases read with different widths."""
    return [(count, 8), (count, 4)]


READS = "reads a value from the device that its kernels would have written"

_READER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

# These copy to a tensor or number of the program, and their handlers provide the values.
_TRANSFERS = frozenset({
    "aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::_foreach_copy_",
    "aten::_local_scalar_dense", "aten::_pin_memory", "aten::equal", "aten::set_",
})  # fmt: skip

# Packages whose frames lie between an operator's code and the mode: the emulator and PyTorch.
_BETWEEN = frozenset({"", "torch"})


class HostReads:
    """Decides which copies from device to host are allowed.

    `dispatch` is the code of the mode's `__torch_dispatch__`, whose frames show the operator.
    """

    def __init__(self, dispatch: CodeType, unknowns: Unknowns) -> None:
        self._dispatch = dispatch
        self._unknowns = unknowns
        self.end: Callable[[], None] = lambda: None
        """Ends the emulation after a refused copy; by default only the copy fails."""
        self.told: Callable[[], None] = lambda: None
        """Called before each copy is checked."""
        self._library = ctypes.CDLL(None)
        self._reader = _READER(self._may_read)

    def install(self) -> None:
        """Check every copy to the host from now on."""
        self._library.emu_set_reader(self._reader)
        atexit.register(self._library.emu_set_reader, None)

    def _may_read(self, to: int, start: int, size: int) -> int:
        self.told()
        frame = sys._getframe(1)
        call = self._call_in(frame)
        if call is None:
            # Operators come to the mode; `torch.tensor` of tensors reads without it.
            key = torch._C.DispatchKey.Python
            is_left_out = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
            if is_left_out or not torch._C._len_torch_dispatch_stack():
                return 1  # PyTorch's own copy outside of all modes
            by = f"in the thread {threading.current_thread().name}"
            if frame is not None:
                by = f"called by {frame.f_code.co_qualname}"
            return self.refuse(f"compiled code {by}", frame)
        func, args, kwargs = call
        name = getattr(getattr(func, "_schema", None), "name", str(func))
        if name in _TRANSFERS:
            return 1
        for tensor in tensors_in((args, tuple(kwargs.values()))):
            if not tensor.is_cuda:
                if _holds(tensor, to):
                    return 1
            elif _holds(tensor, start) and is_known(tensor):
                origin = origin_of(tensor)
                if origin is not None:
                    self._unknowns.decided(name, origin)
                return 1
        return self.refuse(name, frame)

    def _call_in(self, frame: FrameType | None) -> tuple[Any, Any, Any] | None:
        """The operator that runs in this thread, with its arguments, or None."""
        while frame is not None and package_of(frame.f_code.co_filename) in _BETWEEN:
            if frame.f_code is self._dispatch:
                found = frame.f_locals
                return found["func"], found["args"], found["kwargs"] or {}
            frame = frame.f_back
        return None

    def refuse(self, name: str, frame: FrameType | None, why: str = READS) -> int:
        """End the emulation at something that is not emulated; returns 0."""
        own, library = places(frames_of(frame))
        line = own or library
        where = f" at {line}" if line else ""
        self._library.emu_unknown(f"{name} ({why}){where}".encode())
        send({"event": "unsupported", "operator": name, "why": why, "line": line})
        sys.stderr.write(f"tuner's emulator: {name}{where} {why}, which is not emulated\n")
        self.end()
        return 0


def _holds(tensor: torch.Tensor, address: int) -> bool:
    """True if an address lies in the memory of a tensor."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # a sparse tensor has no storage of its own
        return False
    return storage.data_ptr() <= address < storage.data_ptr() + max(storage.nbytes(), 1)
