"""Where a real trial runs: the device, the limit on it, and the memory that the trial takes."""

from __future__ import annotations

from typing import Any

import torch

from tuner.core.errors import InputError
from tuner.core.host import cpu_name
from tuner.core.records import Memory
from tuner.core.units import format_gib
from tuner.space.gpus import match_device
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.device import RealEnvironment, alloc_retries, limit_memory, parse_device
from tuner.trial.footprint import DeviceMemory, Footprint


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
            # What the driver and the context take of a device is part of its memory.
            context = self._context_bytes() if self._footprint else 0
            if options.memory_limit_bytes <= context:
                raise InputError(
                    f"a memory limit of {format_gib(options.memory_limit_bytes)} leaves nothing "
                    f"beside the CUDA context, which takes {format_gib(context)}"
                )
            limit_memory(options.device, options.memory_limit_bytes - context)

    def memory(self, environment: RealEnvironment) -> tuple[Memory, DeviceMemory]:
        """Peaks of all steps so far, and what the driver counts now."""
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
        """The highest device memory so far; reads the driver once a call."""
        context = self._context_bytes() if self._footprint else 0
        return int(peaks_of(environment)["peak_reserved_bytes"]) + context

    def alloc_retries(self) -> int | None:
        """How often the allocator gave cached blocks back; None on the processor."""
        return alloc_retries(self._device)

    def _real_gpu(self) -> Any:
        """The catalogue's entry of this very device; None for one that is not in it."""
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
    """The highest memory so far, in all and by phase, in bytes."""
    allocated, reserved = environment.meter.peaks()
    return {
        "loaded_bytes": environment.loaded_bytes,
        "phase_peak_bytes": {str(p): n for p, n in environment.phase_peak_bytes.items()},
        "peak_allocated_bytes": max(environment.peak_allocated_bytes, allocated),
        "peak_reserved_bytes": max(environment.peak_reserved_bytes, reserved),
    }
