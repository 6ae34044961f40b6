"""Checks before a trial that the device is free. Waits for a busy one, but never clears it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

from tuner.core import host, nvml
from tuner.core.errors import UnavailableError
from tuner.core.units import GIB, format_gib
from tuner.trial.base import MeasureOptions

IDLE_BYTES = 1 * GIB
"""An idle device may have this much memory in use: firmware, a desktop, and up to 0.6 GiB of
drivers that count their own memory as used (nvidia-smi on an H100)."""

SETTLE_S = 3.0
"""A busy device is refused only after this time: the driver needs a moment to free the memory of
a process that has ended."""

_LOOK_EVERY_S = 0.5

Waiting = Callable[[float], bool]
"""Waits the given number of seconds. If the trial is given up, returns True at once."""


def wait_for_device(options: MeasureOptions, given_up_within: Waiting) -> bool:
    """Wait until the device is free; False if the trial was given up meanwhile.

    Raises `UnavailableError`, with the names of the processes that hold the device, if it isn't
    free after `SETTLE_S`.
    """
    until_s = time.monotonic() + SETTLE_S
    while (text := obstacle(options)) is not None:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise UnavailableError(
                text,
                hint="stop them, wait for them, or use another device: tuner never ends other "
                "people's processes",
            )
        if given_up_within(min(left_s, _LOOK_EVERY_S)):
            return False
    return True


def obstacle(options: MeasureOptions) -> str | None:
    """The obstacle to a trial on the device of `options`, or None.

    On a GPU: other processes that compute on it, or memory in use by unknown processes. On the
    CPU: less free memory than the trial's limit. Without NVIDIA's driver nothing is known, and
    the trial itself will show it. Raises `UnavailableError` if the driver has no such GPU, or
    can't talk to it.
    """
    index = options.gpu_index
    if index is None:
        return _host_obstacle(options.memory_limit_bytes)
    processes = nvml.device_processes(index)
    use = nvml.device_use(index)
    others = [process for process in processes or () if process.pid != os.getpid()]
    if others:
        sizes = (None if p.used_bytes is None else format_gib(p.used_bytes) for p in others)
        named = (
            f"{process.name} (process {process.pid}{f', {size}' * bool(size)})"
            for process, size in zip(others, sizes, strict=True)
        )
        return f"{options.device} is in use by {', '.join(named)}"
    return None if use is None else _memory_obstacle(options, use)


def require_answer(options: MeasureOptions) -> None:
    """Raise `UnavailableError` if the driver can't talk to the GPU of `options` any more.

    A failure on such a device says nothing about the configuration.
    """
    index = options.gpu_index
    if index is not None and (fault := nvml.device_fault(index)) is not None:
        raise nvml.DeviceLostError(fault)


def _memory_obstacle(options: MeasureOptions, use: nvml.DeviceUse) -> str | None:
    """Memory in use by processes the driver doesn't name: another container, or a desktop."""
    if use.used_bytes <= IDLE_BYTES:
        return None
    limit = options.memory_limit_bytes
    if limit is not None and use.total_bytes - use.used_bytes >= limit + IDLE_BYTES:
        return None
    return (
        f"{format_gib(use.used_bytes)} of {options.device} is in use by processes that the driver "
        "does not name"
    )


def _host_obstacle(limit_bytes: int | None) -> str | None:
    available = host.available_memory_bytes()
    if limit_bytes is None or available is None or available >= limit_bytes:
        return None
    return (
        f"{format_gib(available)} of memory are free on this machine, and a trial may use "
        f"{format_gib(limit_bytes)}"
    )


# The driver's log (Xid 79), and NVML's texts and names for a device that no longer answers until
# it is reset (nvml.h: NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED).
_LOST_DEVICE = re.compile(
    r"fallen off the bus|GPU is lost|GPU_IS_LOST|GPU requires reset|RESET_REQUIRED", re.IGNORECASE
)


def says_device_is_lost(text: str) -> bool:
    """True if an error says that its device is lost until it is reset."""
    return _LOST_DEVICE.search(text) is not None
