"""Checks all copies from device to host: a compiled operator may read a count that it needs.

Emulated kernels write nothing, so such an operator would read an arbitrary number. The stand-in
runtime asks here before each copy (device/answers.c). Copies by PyTorch's own transfers and known
values are allowed; any other copy ends the emulation with the operator's name.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from tuner.cost.operators.operators import tensors_in
from tuner.emulator.inside.failing import send
from tuner.emulator.inside.lines import Unknowns, frames_of, package_of, places
from tuner.emulator.inside.notes import is_known, origin_of

READS = "reads a value from the device that its kernels would have written"

_READER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

# These copy to a tensor or number of the program, and their handlers provide the values.
_TRANSFERS = frozenset(
    {
        "aten::_to_copy",
        "aten::copy_",
        "aten::_copy_from",
        "aten::_foreach_copy_",
        "aten::_local_scalar_dense",
        "aten::_pin_memory",
        "aten::equal",
        "aten::set_",
    }
)

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
            if not _is_under_mode():
                return 1  # PyTorch's own copy outside of all modes
            return self.refuse(_function_in(frame), frame)
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


def _is_under_mode() -> bool:
    """True if operators come to the mode; `torch.tensor` of tensors reads without it."""
    key = torch._C.DispatchKey.Python
    left = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    return not left and bool(torch._C._len_torch_dispatch_stack())


def _function_in(frame: FrameType | None) -> str:
    """The Python function that called compiled code."""
    if frame is None:
        return f"compiled code in the thread {threading.current_thread().name}"
    return f"compiled code called by {frame.f_code.co_qualname}"


def _holds(tensor: torch.Tensor, address: int) -> bool:
    """True if an address lies in the memory of a tensor."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # a sparse tensor has no storage of its own
        return False
    return storage.data_ptr() <= address < storage.data_ptr() + max(storage.nbytes(), 1)
