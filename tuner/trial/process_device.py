"""The memory and use of a device, by the process that trains on it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from tuner.core.errors import InputError
from tuner.core.host import cpu_name
from tuner.core.nvml import DeviceReader, DeviceUse, device_use, open_reader
from tuner.core.records import Memory
from tuner.core.units import format_gib
from tuner.space.gpus import match_device
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.device import RealEnvironment, alloc_retries, limit_memory, parse_device


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on the device now: as counted by the driver, and beyond PyTorch's own.

    `context_bytes` is None if the driver gives no numbers.
    """

    process_bytes: int | None
    device_bytes: int | None
    context_bytes: int | None


class Footprint:
    """Follows this process's memory on one CUDA device. Made before the device is touched."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index or 0
        self._before = device_use(self._index)

    def read(self) -> DeviceMemory:
        """The driver's memory numbers now.

        In a container the driver may not tell processes apart. Then the increase in the device's
        memory counts as this process's, which is right while no other process uses the device.
        """
        use = device_use(self._index)
        if use is None:
            return DeviceMemory(None, None, None)
        own = self._own_bytes(use)
        reserved = torch.cuda.memory_reserved(self._device)
        context = None if own is None else max(0, own - reserved)
        return DeviceMemory(use.process_bytes, use.used_bytes, context)

    def _own_bytes(self, use: DeviceUse) -> int | None:
        if use.process_bytes is not None:
            return use.process_bytes
        return use.used_bytes - self._before.used_bytes if self._before else None


INTERVAL_S = 0.1


class GpuWatch:
    """Watches CUDA device `index` between `__enter__` and `__exit__`; None watches nothing."""

    def __init__(self, index: int | None) -> None:
        self._reader: DeviceReader | None = open_reader(index) if index is not None else None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._shares: list[float] = []

    def __enter__(self) -> GpuWatch:
        if self._reader is not None:
            self._thread = threading.Thread(target=self._sample, daemon=True, name="gpu-watch")
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._reader is None or self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._reader.close()

    @property
    def utilization(self) -> float | None:
        """Mean share of the time in which a kernel ran, 0 to 1; None if it is unknown."""
        return fmean(self._shares) if self._shares else None

    def _sample(self) -> None:
        assert self._reader is not None
        while True:
            share = self._reader.utilization()
            if share is not None:
                self._shares.append(share)
            if self._stop.wait(INTERVAL_S):
                return


class ProcessDevice:
    """The device of a trial: its name, the GPU type it really is, and its memory."""

    def __init__(self, job: TrialJob, options: MeasureOptions) -> None:
        self._device = parse_device(options.device)
        self._job = job
        self._footprint: Footprint | None = None
        self.notes: list[str] = []
        if self._device.type == "cuda":
            self._footprint = Footprint(self._device)
            torch.zeros(1, device=self._device)  # creates the context
            self.name = torch.cuda.get_device_name(self._device)
            self.gpu = self._real_gpu()
        else:
            self.name = cpu_name()
            self.gpu = job.gpu
        if options.memory_limit_bytes is not None:
            # Memory of the driver and of the context is part of the device's memory.
            context = self._context_bytes() if self._footprint else 0
            if options.memory_limit_bytes <= context:
                raise InputError(
                    f"a memory limit of {format_gib(options.memory_limit_bytes)} leaves nothing "
                    f"beside the CUDA context, which takes {format_gib(context)}"
                )
            limit_memory(options.device, options.memory_limit_bytes - context)

    def memory(self, environment: RealEnvironment) -> tuple[Memory, DeviceMemory]:
        """Peaks of all steps so far, and the driver's numbers now."""
        peaks = peaks_of(environment)
        reserved = peaks["peak_reserved_bytes"]
        phases = peaks["phase_peak_bytes"]
        known = self._footprint.read() if self._footprint else DeviceMemory(None, None, None)
        context = self._context_bytes(known) if self._footprint else 0
        memory = Memory(
            peak_allocated_bytes=peaks["peak_allocated_bytes"],
            peak_reserved_bytes=reserved,
            device_bytes=reserved + context,
            loaded_bytes=environment.loaded_bytes or 0,
            phase_peak_bytes=phases,
            peak_phase=max(phases, key=lambda name: int(phases[name]), default=""),
            breakdown={},
        )
        return memory, known

    def device_bytes(self, environment: RealEnvironment) -> int:
        """The highest device memory so far, in bytes; each call reads the driver once."""
        context = self._context_bytes() if self._footprint else 0
        return int(peaks_of(environment)["peak_reserved_bytes"]) + context

    def alloc_retries(self) -> int | None:
        """The number of times the allocator freed its cached blocks; None on the processor."""
        return alloc_retries(self._device)

    def _real_gpu(self) -> Any:
        """The catalogue entry of the actual device; None if it has none."""
        if self.name in self._job.gpu.device_names:
            return self._job.gpu
        total = torch.cuda.get_device_properties(self._device).total_memory
        return match_device(self.name, total)

    def _context_bytes(self, known: DeviceMemory | None = None) -> int:
        assert self._footprint is not None
        known = known or self._footprint.read()
        if known.context_bytes is not None:
            return known.context_bytes
        note = (
            "the driver does not report what the CUDA context takes: the catalogue's size is used"
        )
        if note not in self.notes:
            self.notes.append(note)
        return self._job.gpu.context_bytes


def peaks_of(environment: RealEnvironment) -> dict[str, Any]:
    """The highest memory so far in bytes, overall and by phase."""
    allocated, reserved = environment.meter.peaks()
    return {
        "loaded_bytes": environment.loaded_bytes,
        "phase_peak_bytes": {str(p): n for p, n in environment.phase_peak_bytes.items()},
        "peak_allocated_bytes": max(environment.peak_allocated_bytes, allocated),
        "peak_reserved_bytes": max(environment.peak_reserved_bytes, reserved),
    }
