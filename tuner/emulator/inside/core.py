"""The part of the emulated device that pricing uses: its clock and its record of launches."""

from __future__ import annotations

import ctypes
import re
from typing import NamedTuple

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
