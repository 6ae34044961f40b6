"""The stand-in libraries that pricing uses: the device, its launches, and repeated operators.

Operators whose repetitions need no Python are judged here, and run by device/repeats.cpp. Views
launch nothing and have no values. An operator that returns or changes only large tensors of
floats settles nothing if it reads a large tensor of floats without a note: its results are unknown,
and stay without a note. Both follow from the layouts of its arguments and from their notes. So one
call is judged for all that have the same, and later ones only run and are counted.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tuner.cost.operators.operators import tensors_in
from tuner.emulator.inside.notes import FLOATS, SMALL, STRIDED, follow_notes, noted
from tuner.emulator.inside.operators import EMPTY, OPENED, Operator
from tuner.emulator.inside.readbacks import COUNTED

MOST_KEPT = 65536
"""The device remembers this many launches (device.c)."""

_DTYPES = {
    0: "float32",
    1: "float64",
    2: "float16",
    3: "int8",
    14: "bfloat16",
    28: "float8_e4m3fn",
    29: "float8_e5m2",
}
"""Element types by their number in `cudaDataType` (library_types.h)."""


class KernelLaunch(NamedTuple):
    """One kernel launch; a product has m, n, k as grid and (batch, dtype, arithmetic) as block."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def product(self) -> tuple[str, tuple[int, int, int, int]] | None:
        """Element type and (batch, m, n, k) of a cuBLAS product; None for other kernels."""
        if not self.name.startswith("cublas"):
            return None
        return _DTYPES.get(self.block[1], "float32"), (self.block[0] or 1, *self.grid)


class _Raw(ctypes.Structure):
    """`struct emu_launch` of device.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
    )


class Shared(ctypes.Structure):
    """`struct Shared` of device/repeats.cpp: what its counts of calls depend on."""

    _fields_ = (
        ("seen", ctypes.c_int64),
        ("on", ctypes.c_int8),
        ("in_backward", ctypes.c_int8),
        ("recomputing", ctypes.c_int8),
        ("host", ctypes.c_int8),
        ("watched", ctypes.c_int8),
        ("recomputed", ctypes.c_double),
    )


class DeviceCore:
    """The device of the stand-in libraries, which this process has loaded.

    `work(host_ns, device_ns)` adds work by the time that the host takes to issue it, and the device
    to do it. `launch_count()` is the number of kernels that this process has launched, and
    `device_now_ns()` the virtual time of the device.
    """

    def __init__(self, library: str | None = None) -> None:
        # PyDLL keeps Python's lock: releasing and retaking it costs more than these calls.
        loaded = ctypes.PyDLL(library)
        loaded.emu_work.argtypes = (ctypes.c_double, ctypes.c_double)
        loaded.emu_work.restype = None
        loaded.emu_launch_count.restype = ctypes.c_uint64
        loaded.emu_device_now_ns.restype = ctypes.c_double
        loaded.emu_launches.argtypes = (ctypes.c_uint64, ctypes.POINTER(_Raw), ctypes.c_uint64)
        loaded.emu_launches.restype = ctypes.c_uint64
        # Bound once: a Python method around it would double the cost of a call.
        self.work = loaded.emu_work
        self.launch_count = loaded.emu_launch_count
        self.device_now_ns = loaded.emu_device_now_ns
        self._launches = loaded.emu_launches

    def launches(self, first: int, most: int) -> list[KernelLaunch]:
        """The remembered launches from number `first` on, at most `most` of them."""
        buffer = (_Raw * min(most, MOST_KEPT))()
        count = self._launches(first, buffer, len(buffer))
        return [
            KernelLaunch(raw.name.decode(errors="replace"), tuple(raw.grid), tuple(raw.block))
            for raw in buffer[:count]
        ]


def readable(name: str) -> str:
    """A kernel's name without C++'s mangling: "at::native::fill" of "_ZN2at6native4fillEv"."""
    if not name.startswith("_Z"):
        return name
    rest, parts = re.sub(r"^_ZN?[LK]*", "", name), []
    while match := re.match(r"(\d+)", rest):
        length = int(match[1])
        start = match.end()
        parts.append(rest[start : start + length])
        rest = rest[start + length :]
    return "::".join(part for part in parts if not part.startswith("_GLOBAL__N")) or name


Rule = Callable[[tuple[Any, ...], dict[str, Any], Any], bool]

LIBRARY = "libtuner_repeats.so"
_VIEW, _KEYED, _LEFT = 1, 2, 3
_MODE, _NOTHING, _COUNTED = 0, 1, 2
_DYNAMIC = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


class Repeats:
    """The library that runs repeated operators, for a mode that is on the stack."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.tuner_judge.argtypes = (ctypes.c_int, ctypes.c_int64, *[ctypes.c_double] * 2)
        library.tuner_note.argtypes = (ctypes.c_void_p, ctypes.c_int)
        library.tuner_take.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
        self.shared = Shared.in_dll(library, "tuner_shared")
        self.asks: Callable[[], int] = library.tuner_asks
        """1 if the call that the mode runs can be judged."""
        self.forget: Callable[[], None] = library.tuner_forget
        """Forget all judgements."""
        self.restart: Callable[[], None] = library.tuner_restart
        """Forget all judgements and counts."""

    @classmethod
    def begin(cls, mode: Any) -> Repeats | None:
        """Run the operators that come to `mode` without it, where possible.

        None if the library was not built: there is no compiler of C++, or PyTorch is another.
        """
        path = Path(os.environ["TUNER_EMULATOR_LIBRARIES"], LIBRARY)
        if not path.exists():
            return None
        library = ctypes.PyDLL(str(path))
        if not library.tuner_install(ctypes.c_void_p(id(mode))):
            return None
        follow_notes(library.tuner_note)
        return cls(library)

    def learn(self, func: Any, *, is_nothing: bool) -> Rule | None:
        """Tell how to treat an operator; returns the rule for its calls, if they can be judged."""
        if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
            return None
        rule = None if is_nothing else _rule(Operator(func))
        state = _VIEW if is_nothing else _LEFT if rule is None else _KEYED
        name, _, overload = func.name().partition(".")  # type: ignore[no-untyped-call]
        self._library.tuner_operator(name.encode(), overload.encode(), state)
        return rule

    def judge(self, *, settles: bool, price: Any) -> None:
        """Judge the call that the mode runs, which costs `price`, a tuple or None."""
        kind = _MODE if settles else _NOTHING if price is None else _COUNTED
        self._library.tuner_judge(kind, *(price or (0, 0.0, 0.0)))

    def take(self, size: int) -> Iterator[tuple[bool, int, int]]:
        """(again, number, count) of the calls since the last time; numbers are below `size`."""
        numbers = (ctypes.c_int64 * size)()
        for again in (False, True):
            self._library.tuner_take(int(again), numbers, size)
            yield from ((again, number, one) for number, one in enumerate(numbers) if one)


def _rule(operator: Operator) -> Rule | None:
    if operator.is_foreach or operator.leaves or operator.is_random or operator.is_constant:
        return None
    if operator.full_name in OPENED | COUNTED.keys() or _DYNAMIC & set(operator.func.tags):
        return None
    if operator.name in EMPTY or operator.name in {"aten::copy_", "aten::resize_", "aten::set_"}:
        return None
    if operator.mutates:
        return None if operator.overwrites or operator.fills else _changes_unknown
    return _returns_unknown if not operator.passes else _returns_large


def _returns_unknown(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """True if a new result is unknown, because an argument is."""
    return _returns_large(args, kwargs, out) and any(map(_is_unknown, tensors_in(args)))


def _returns_large(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """True if all results are large tensors of floats."""
    outs = out if isinstance(out, tuple | list) else (out,)
    return all(isinstance(one, torch.Tensor) and _is_large(one) for one in outs)


def _changes_unknown(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """True if an unknown tensor is changed in place, and stays unknown."""
    return isinstance(out, torch.Tensor) and out is args[0] and _is_unknown(out)


def _is_large(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_cuda
        and tensor.layout is STRIDED
        and tensor.dtype in FLOATS
        and tensor.numel() > SMALL
    )


def _is_unknown(tensor: torch.Tensor) -> bool:
    return _is_large(tensor) and noted(tensor) is None
