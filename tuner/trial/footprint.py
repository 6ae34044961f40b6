"""What a process takes of a CUDA device beyond the memory that PyTorch reserves.

The CUDA context and the kernels that were loaded are seen by the driver only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tuner.core.nvml import DeviceUse, device_use


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on the device now: as the driver counts them, and beyond PyTorch's own.

    `context_bytes` is None where the driver tells nothing.
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
        """What the driver says now.

        In a container it may not tell processes apart; then what the device holds beyond what
        it held before is taken for this process's, which is right while it has the device alone.
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
