"""The emulator as seen from inside a process: whether its GPU is emulated, and the GPU's clock."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

DEVICE_VARIABLE = "TUNER_EMULATOR"
LIBRARIES_VARIABLE = "TUNER_EMULATOR_LIBRARIES"

TELL_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 5  # systems without it cannot emulate
"""Tells the processes of an emulated program to send their results and end, on a timeout."""

TIMEOUT = "timeout"
"""The reason in a result that a process sends on `TELL_SIGNAL`."""


def is_emulated() -> bool:
    """True if the CUDA devices of this process are emulated."""
    return bool(os.environ.get(DEVICE_VARIABLE))


def begin_phase(phase: str, step: int, trained: int) -> None:
    """Tell this process's pricer, if any, that a phase begins of a step of `trained` parameters."""
    activate = sys.modules.get("tuner.emulator.inside.activate")
    pricer = activate.ACTIVE.get("pricer") if activate is not None else None
    if pricer is not None:
        pricer.begin(phase, step, trained)


@functools.cache
def device_core() -> ctypes.CDLL:
    """The library that holds the devices of this process (device/device.h)."""
    return ctypes.CDLL(str(Path(os.environ[LIBRARIES_VARIABLE]) / "libtuner_device.so"))


def emulated_clock() -> Callable[[], float]:
    """The virtual clock of this process's emulated devices, in seconds.

    It advances by the estimated time of operators. After a wait for the device, the time includes
    all of the device's work.
    """
    now_ns = device_core().emu_host_now_ns
    now_ns.restype = ctypes.c_double
    return lambda: float(now_ns()) / 1e9
