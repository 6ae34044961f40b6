"""Readings of this machine's devices and of its processor, and what they advise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from tuner.core import host, nvml
from tuner.core.nvml import DeviceProcess, DeviceReader
from tuner.core.units import format_gib

BUSY = 0.9
"""Share of the time from which on a device or a processor counts as busy."""
HALF_IDLE = 0.7
"""A GPU that computes less of the time than this waits for something: training that is bound by
its own kernels shows 95 % and more."""
NEARLY_FULL = 0.95
ROOMY = 0.6
"""Share of device memory; if less is in use, a larger micro-batch may fit."""
FEW = 3
"""Readings before something is said of what changes from one moment to the next."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device at one moment; None is what the driver does not tell.

    `utilization` is the share of the driver's last sample period in which a kernel ran.
    """

    index: int
    name: str
    used_bytes: int | None = None
    total_bytes: int | None = None
    utilization: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    clock_hz: float | None = None
    max_clock_hz: float | None = None
    slowdowns: tuple[str, ...] = ()
    processes: tuple[DeviceProcess, ...] = ()
    fault: str | None = None
    """Why the device does not answer any more."""


@dataclass(frozen=True, slots=True)
class HostReading:
    """The processors and the memory of this machine; `cpu_share` is of the time since before."""

    cpus: int
    cpu_share: float | None
    used_bytes: int | None
    total_bytes: int


@dataclass(frozen=True, slots=True)
class MachineReading:
    """Everything at one moment."""

    devices: tuple[DeviceReading, ...]
    host: HostReading

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


class Watcher:
    """Reads the devices with these indices, none of them without a driver, and the host."""

    def __init__(self, indices: Sequence[int]) -> None:
        readers = [(index, nvml.open_reader(index)) for index in indices]
        self._readers = [
            (index, reader, reader.name()) for index, reader in readers if reader is not None
        ]
        self._times = host.cpu_times()

    def read(self) -> MachineReading:
        """The current reading; the processors' share covers the time since the last call."""
        devices = tuple(_device(*each) for each in self._readers)
        return MachineReading(devices, self._host())

    def close(self) -> None:
        """Let the driver's library go."""
        for _, reader, _ in self._readers:
            reader.close()

    def _host(self) -> HostReading:
        before, now = self._times, host.cpu_times()
        self._times = now
        share = None
        if before is not None and now is not None and now.total > before.total:
            share = (now.busy - before.busy) / (now.total - before.total)
        total, available = host.usable_memory_bytes(), host.available_memory_bytes()
        used = None if available is None else total - available
        return HostReading(host.usable_cpus(), share, used, total)


def _device(index: int, reader: DeviceReader, name: str) -> DeviceReading:
    """The device's current reading; a lost device has only its name."""
    fault = reader.fault()
    if fault is not None:
        return DeviceReading(index=index, name=name, fault=fault)
    memory, clocks = reader.memory() or (None, None), reader.clocks_hz() or (None, None)
    return DeviceReading(
        index=index,
        name=name,
        used_bytes=memory[0],
        total_bytes=memory[1],
        utilization=reader.utilization(),
        power_w=reader.power_w(),
        power_limit_w=reader.power_limit_w(),
        temperature_c=reader.temperature_c(),
        clock_hz=clocks[0],
        max_clock_hz=clocks[1],
        slowdowns=reader.slowdowns() or (),
        processes=reader.processes() or (),
    )


def advice(readings: Sequence[MachineReading]) -> list[str]:
    """Advice from the last readings, which are oldest first; each with its number."""
    if not readings:
        return []
    last = readings[-1]
    texts = []
    for place in range(len(last.devices)):
        series = [r.devices[place] for r in readings if place < len(r.devices)]
        texts += _device_advice(series, readings)
    return [*texts, *_host_advice(last.host)]


def _device_advice(
    series: Sequence[DeviceReading], readings: Sequence[MachineReading]
) -> list[str]:
    now = series[-1]
    where = f"GPU {now.index}"
    if now.fault is not None:
        return [
            f"{where}: does not answer its driver ({now.fault}); what trained there failed. The "
            "kernel's log says why (dmesg | grep -i xid), and `tuner doctor` what to do"
        ]
    texts = []
    if now.slowdowns:
        clocks = ""
        if now.clock_hz and now.max_clock_hz:
            clocks = f": {now.clock_hz / 1e6:.0f} of {now.max_clock_hz / 1e6:.0f} MHz"
        texts.append(f"{where}: clocks are held down by {', '.join(now.slowdowns)}{clocks}")
    if len(now.processes) > 1:
        names = ", ".join(f"{p.name} ({p.pid})" for p in now.processes)
        texts.append(f"{where}: {len(now.processes)} processes share it: {names}")
    used = now.used_bytes / now.total_bytes if now.used_bytes and now.total_bytes else None
    if used is not None and used >= NEARLY_FULL:
        texts.append(
            f"{where}: {used:.0%} of the memory is in use; a longer batch may run out of it "
            "(--headroom 10% of `tuner best` recommends with more room)"
        )
    # How busy it is says something of a training only, and not of a moment.
    shares = [r.utilization for r in series if r.utilization is not None]
    if not now.processes or len(shares) < FEW:
        return texts
    busy = fmean(shares)
    if busy < HALF_IDLE:
        texts.append(f"{where}: idle {1 - busy:.0%} of the time{_why_idle(readings)}")
    if used is not None and used < ROOMY:
        assert now.used_bytes is not None
        assert now.total_bytes is not None
        free = format_gib(now.total_bytes - now.used_bytes)
        texts.append(f"{where}: {free} are free; a larger micro_batch may be faster (`tuner best`)")
    return texts


def _why_idle(readings: Sequence[MachineReading]) -> str:
    shares = [r.host.cpu_share for r in readings if r.host.cpu_share is not None]
    if shares and fmean(shares) >= BUSY:
        return (
            f" and the processors are busy ({fmean(shares):.0%}): it waits for them; prepare the "
            "data before the training, or use a machine with more cores"
        )
    number = f" ({fmean(shares):.0%} busy)" if shares else ""
    return (
        f" while the processors have time{number}: more num_workers in the data loader, or a "
        "larger micro_batch if kernels are short"
    )


def _host_advice(now: HostReading) -> list[str]:
    if now.used_bytes is None or now.used_bytes < NEARLY_FULL * now.total_bytes:
        return []
    return [
        f"host: {now.used_bytes / now.total_bytes:.0%} of the memory is in use; the system may "
        "end the training: fewer num_workers, or less that is kept in memory"
    ]
