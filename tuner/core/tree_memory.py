"""Memory of a process and all its descendants, by the kernel, or on a GPU by the driver."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from tuner.core import nvml
from tuner.core.processes import descendants
from tuner.core.units import KIB

_EVERY_S = 0.1
_COST_SHARE = 0.05
"""Looking may take this share of the time: it would disturb what is timed."""


class TreeMemory:
    """Follows the memory of the descendants of process `root`; `look` is to be called often.

    `gpu_index` is the CUDA device that counts; None where it is the host's memory. What the host
    has of a single process is the kernel's own peak (VmHWM). Of several, which share pages, it
    is the highest sum of their shares (PSS) that was seen. The driver knows no peaks: what PyTorch
    keeps reserved is seen, what other libraries hold for an instant may be missed.
    """

    def __init__(self, root: int, gpu_index: int | None) -> None:
        self._root = root
        self._gpu_index = gpu_index
        use = None if gpu_index is None else nvml.device_use(gpu_index)
        self._before_bytes = None if use is None else use.used_bytes
        self._due_s = 0.0
        self.peak_bytes = 0
        self.is_of_device = False
        """Whether it is what the whole device holds more than before: the driver, in a
        container, does not tell processes apart."""

    def look(self, *, now: bool = False) -> int:
        """Bytes at present, and the peak noted, if it is time to look (or `now`); else the peak."""
        started_s = time.monotonic()
        if not now and started_s < self._due_s:
            return self.peak_bytes
        pids = descendants(self._root)
        used_bytes = _host_bytes(pids) if self._gpu_index is None else self._device_bytes(set(pids))
        self.peak_bytes = max(self.peak_bytes, used_bytes)
        ended_s = time.monotonic()
        self._due_s = ended_s + max(_EVERY_S, (ended_s - started_s) / _COST_SHARE)
        return used_bytes

    def _device_bytes(self, pids: set[int]) -> int:
        assert self._gpu_index is not None
        named = nvml.device_processes(self._gpu_index) or ()
        own = [p.used_bytes for p in named if p.pid in pids and p.used_bytes is not None]
        if own:
            return sum(own)
        use = nvml.device_use(self._gpu_index)
        if use is None or self._before_bytes is None or use.used_bytes <= self._before_bytes:
            return 0
        self.is_of_device = True
        return use.used_bytes - self._before_bytes


def _host_bytes(pids: Iterable[int]) -> int:
    known = [(_peak_bytes(pid), pid) for pid in pids]
    living = [(peak, pid) for peak, pid in known if peak is not None]
    highest = max((peak for peak, _ in living), default=0)
    return highest if len(living) < 2 else max(highest, sum(_share_bytes(p) for _, p in living))


def _peak_bytes(pid: int) -> int | None:
    """VmHWM, which psutil does not have on Linux; None for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * KIB if found else None


def _share_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:  # it has ended
        return 0
