"""A device as the NVIDIA driver sees it: memory in use, its processes, driver version.

Reading it creates no CUDA context, so a process that will fork may ask. Everything is None
where the driver does not answer (no NVIDIA driver, or a container that hides processes). A
device that the driver knows and cannot talk to, because it fell off the bus or needs a reset,
is a `DeviceLostError`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.core.errors import UnavailableError

_LOST = (
    8,  # NVML_ERROR_INSUFFICIENT_POWER: a cable is not attached
    10,  # NVML_ERROR_TIMEOUT
    11,  # NVML_ERROR_IRQ_ISSUE
    15,  # NVML_ERROR_GPU_IS_LOST
    16,  # NVML_ERROR_RESET_REQUIRED
    999,  # NVML_ERROR_UNKNOWN: "Unable to determine the device handle for GPU"
)
"""Errors of a device that is there and does not answer (nvml.h, nvmlReturn_t)."""

MOST_DEVICES = 64
"""More than any machine has."""


class UnknownDeviceError(UnavailableError, LookupError):
    """The driver has no device of this index."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="`tuner doctor` lists the GPUs of this machine")


class DeviceLostError(UnavailableError, LookupError):
    """The driver knows the device, and it does not answer any more."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            hint="the kernel log says why (`dmesg | grep -i xid`); a reset (`nvidia-smi "
            "--gpu-reset`) or a reboot may bring it back",
        )


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Memory of a device at one moment, in bytes.

    `used_bytes` is in use by any process, `process_bytes` by one; None where the driver does not
    tell (process ids of another namespace). `total_bytes` is what CUDA has: the driver keeps some
    of the card for itself, 480 MiB on an H100. Drivers before 510 count that as used.
    """

    used_bytes: int
    total_bytes: int
    process_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """Exact name, memory in bytes, compute capability and driver version of a device."""

    name: str
    total_bytes: int
    compute_capability: tuple[int, int]
    driver: str


@dataclass(frozen=True, slots=True)
class _DeviceProcess:
    """A process that computes on a device; memory in bytes, None where the driver is silent.

    In a container, `pid` may be of another namespace, and `name` then only its number.
    """

    pid: int
    name: str
    used_bytes: int | None


def device_fault(index: int = 0) -> str | None:
    """Why the driver cannot talk to CUDA device `index`; None where it can, or has none."""
    try:
        with _handle(index) as found:
            if found is not None:
                nvml, handle = found
                nvml.nvmlDeviceGetMemoryInfo(handle)
    except DeviceLostError as error:
        return error.message
    except UnknownDeviceError:
        return None
    return None


def device_processes(index: int = 0) -> tuple[_DeviceProcess, ...] | None:
    """The processes that compute on CUDA device `index`; None where the driver does not tell."""
    with _handle(index) as found:
        if found is None:
            return None
        return _processes(*found)


def device_use(index: int = 0, *, pid: int | None = None) -> DeviceUse | None:
    """Memory in use on CUDA device `index`; None without an NVIDIA driver.

    `pid` is the process to tell apart, this one by default.
    """
    with _handle(index) as found:
        if found is None:
            return None
        nvml, handle = found
        wanted = os.getpid() if pid is None else pid
        own = [p.used_bytes for p in _processes(nvml, handle) or () if p.pid == wanted]
        return DeviceUse(*_memory(nvml, handle), own[0] if own else None)


def device_identity(index: int = 0) -> DeviceIdentity | None:
    """The identity of CUDA device `index`; None without an NVIDIA driver."""
    with _handle(index) as found:
        if found is None:
            return None
        nvml, handle = found
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return DeviceIdentity(
            name=_text(nvml.nvmlDeviceGetName(handle)),
            total_bytes=_memory(nvml, handle)[1],
            compute_capability=(int(major), int(minor)),
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
        )


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver can run, (12, 8); None without an NVIDIA driver."""
    with _driver() as nvml:
        if nvml is None:
            return None
        try:
            version = int(nvml.nvmlSystemGetCudaDriverVersion())
        except nvml.NVMLError:
            return None
    return version // 1000, version % 1000 // 10


SLOWDOWNS: Mapping[int, str] = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature (driver)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""Why clocks are lower than they could be (nvml.h, nvmlClocksEventReasons). Not among them: an
idle GPU (0x1), and clocks set by an administrator (0x2, 0x100)."""


class DeviceReader:
    """Quick readings of one device; None where the device does not have what is asked for."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def utilization(self) -> float | None:
        """Share of the driver's last sample period in which a kernel ran, 0 to 1."""
        rates = self._read("nvmlDeviceGetUtilizationRates")
        return None if rates is None else rates.gpu / 100

    def slowdowns(self) -> tuple[str, ...] | None:
        """The reasons for low clocks, in the words of `SLOWDOWNS`."""
        reasons = self._read("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            return None
        return tuple(text for bit, text in SLOWDOWNS.items() if reasons & bit)

    def processes(self) -> tuple[_DeviceProcess, ...] | None:
        """The processes that compute on the device."""
        try:
            return _processes(self._nvml, self._handle)
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        """Let the driver's library go; the reader cannot be used after it."""
        self._nvml.nvmlShutdown()

    def _read(self, function: str) -> Any:
        try:
            return getattr(self._nvml, function)(self._handle)
        except self._nvml.NVMLError:
            return None


def open_reader(index: int = 0) -> DeviceReader | None:
    """A reader of CUDA device `index`; None without an NVIDIA driver or such a device."""
    nvml = _opened()
    if nvml is None:
        return None
    try:
        return DeviceReader(nvml, _visible_handle(nvml, index))
    except nvml.NVMLError:
        nvml.nvmlShutdown()
        return None


def _opened() -> Any | None:
    """NVIDIA's library, ready to be asked; None without an NVIDIA driver."""
    try:
        import pynvml  # from the package nvidia-ml-py
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@contextlib.contextmanager
def _driver() -> Iterator[Any | None]:
    """As `_opened`, and closed afterwards."""
    nvml = _opened()
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


@contextlib.contextmanager
def _handle(index: int) -> Iterator[tuple[Any, Any] | None]:
    with _driver() as nvml:
        if nvml is None:
            yield None
            return
        try:
            yield nvml, _visible_handle(nvml, index)
        except nvml.NVMLError as error:
            if _is_lost(error):
                text = f"GPU {index} does not answer its driver: {error}"
                raise DeviceLostError(text) from None
            raise UnknownDeviceError(f"the driver knows no CUDA device {index}: {error}") from None


def _is_lost(error: Exception) -> bool:
    return getattr(error, "value", None) in _LOST


def _visible_handle(nvml: Any, index: int) -> Any:
    """The driver's handle of what CUDA calls `index` under CUDA_VISIBLE_DEVICES."""
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    named = visible[index] if visible != [""] and index < len(visible) else str(index)
    if named.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(named))
    return nvml.nvmlDeviceGetHandleByUUID(named)


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Bytes of a device in use and in all, without those that the driver keeps for itself."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError as error:
        if _is_lost(error):
            raise
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.used), int(memory.total)
    return int(memory.used), int(memory.total) - int(memory.reserved)


def _processes(nvml: Any, handle: Any) -> tuple[_DeviceProcess, ...] | None:
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError as error:
        if _is_lost(error):
            raise
        return None
    return tuple(
        _DeviceProcess(
            pid=int(process.pid),
            name=_process_name(nvml, int(process.pid)),
            used_bytes=None if process.usedGpuMemory is None else int(process.usedGpuMemory),
        )
        for process in processes
    )


def _process_name(nvml: Any, pid: int) -> str:
    """The program's name without its folder, else the number."""
    try:
        return Path(_text(nvml.nvmlSystemGetProcessName(pid))).name
    except nvml.NVMLError:
        return f"process {pid}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
