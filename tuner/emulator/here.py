"""What a process can say of itself: whether its GPU is an emulated one, and the time on it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

DEVICE_VARIABLE = "TUNER_EMULATOR"
LIBRARIES_VARIABLE = "TUNER_EMULATOR_LIBRARIES"

TELL_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 5  # others than Linux emulate nothing
"""Has the processes of an emulated program tell their results, and end: their time is up."""

TIMEOUT = "timeout"
"""The reason of a result that a process tells on `TELL_SIGNAL`."""


def is_emulated() -> bool:
    """Whether the CUDA devices that this process sees are emulated ones."""
    return bool(os.environ.get(DEVICE_VARIABLE))


def begin_phase(phase: str, step: int) -> None:
    """Tell what prices this process's operators that a phase of a training step begins."""
    activate = sys.modules.get("tuner.emulator.inside.activate")
    pricer = activate.ACTIVE.get("pricer") if activate is not None else None
    if pricer is not None:
        pricer.begin(phase, step)


def emulated_clock() -> Callable[[], float]:
    """The clock of this process on its emulated devices, in seconds.

    It moves by what operators are estimated to take. Where the device was waited for, it has done
    all its work by then.
    """
    core = ctypes.CDLL(str(Path(os.environ[LIBRARIES_VARIABLE]) / "libtuner_device.so"))
    now_ns = core.emu_host_now_ns
    now_ns.restype = ctypes.c_double
    return lambda: float(now_ns()) / 1e9
