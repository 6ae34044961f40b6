"""Makes runners in the worker that runs them, and checks before a trial that the device is free.

The makers are small picklable objects, and nothing is imported before they are called. A busy
device is waited for, but never cleared.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tuner.core import host, nvml
from tuner.core.errors import UnavailableError
from tuner.core.units import GIB, format_gib
from tuner.emulator.here import is_emulated
from tuner.space.gpus import MEMORY_TOLERANCE
from tuner.trial.base import MeasureOptions, RunnerFactory, TrialJob, TrialRunner, outcome_versions


@dataclass(frozen=True, slots=True)
class EmulatedFactory:
    """Makes runners that train on an emulated machine with `gpus` GPUs; see `RunnerFactory`.

    `environment` has variables for their processes in addition to those of the worker.
    """

    job: TrialJob
    options: MeasureOptions
    gpus: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def __call__(self) -> TrialRunner:
        """See `RunnerFactory`. Raises `UnavailableError` where nothing can be emulated here."""
        from tuner.trial.emulated import EmulatedCommandRunner, EmulatedRunner

        make = EmulatedRunner if self.job.command is None else EmulatedCommandRunner
        # Every step takes the same: one is timed, by its parts.
        options = replace(
            self.options, min_steps=1, budget_s=0.0, short_steps=not self.options.whole_steps
        )
        return make(self.job, options, gpus=self.gpus, environment=self.environment)


@dataclass(frozen=True, slots=True)
class VerifiedFactory:
    """A runner factory that first looks at the worker's GPU.

    `names` are the exact device names that are right, `sizes_bytes` their memory, which may
    differ by 5 %. `identify` says what the GPU is; None asks NVML.
    """

    make: RunnerFactory
    names: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    identify: Callable[[], nvml.DeviceIdentity | None] | None = None

    def __call__(self) -> TrialRunner:
        """The runner. Raises `UnavailableError` with what is there where it is another GPU."""
        found = (self.identify or nvml.device_identity)()
        wanted = " or ".join(self.names)
        node = socket.gethostname()
        if found is None:
            raise UnavailableError(
                f"a worker on {node} has no NVIDIA driver, where trials need {wanted}",
                hint="start that node of the cluster without the resource of this GPU type",
            )
        sizes = [s for s in self.sizes_bytes if abs(found.total_bytes - s) <= MEMORY_TOLERANCE * s]
        if found.name not in self.names or not sizes:
            expected = " or ".join(format_gib(size) for size in self.sizes_bytes)
            raise UnavailableError(
                f"a worker on {node} has {found.name} with {format_gib(found.total_bytes)}, "
                f"where trials need {wanted} with {expected}",
                hint="start that node of the cluster with the resource of its own GPU type",
            )
        return self.make()


@dataclass(frozen=True, slots=True)
class Facts:
    """A machine's own answer: its first GPU, None without a driver, and its libraries."""

    identity: nvml.DeviceIdentity | None
    versions: Mapping[str, str]
    emulated: bool


def look(identify: Callable[[], nvml.DeviceIdentity | None]) -> Facts:
    """The facts of this machine; runs on a node of a cluster, before its first trial."""
    return Facts(identify(), outcome_versions(), is_emulated())


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
