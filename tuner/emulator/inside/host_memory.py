"""The host memory of this process and its workers in each phase, as in a real run (device/host.c).

Anonymous and shared memory counts, as for Linux when it looks for a process to kill; files in the
page cache don't. The memory of workers is measured: pages shared with this process count once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from pathlib import Path
from typing import Any

import torch

from tuner.core.processes import descendants
from tuner.emulator.here import LIBRARIES_VARIABLE, device_core
from tuner.emulator.inside.failing import uses_cuda
from tuner.emulator.inside.faults import guarded

LOOK_EVERY_S = 0.2
"""Workers are measured this often at most."""

RARER = 20
"""Measuring workers takes at most one part in this many of the time."""

_HISTORY_BYTES = 1600
"""An allocation in the history of PyTorch's allocator, with a stack of 40 calls: measured with
PyTorch 2.13, its three entries take 655 bytes at a depth of one call and 1,592 at one of 40."""


_COUNTED = ("Pss_Anon", "Pss_Shmem")


class HostMemory:
    """Follows the host memory of this process; `phase` is the first one.

    `own_bytes` is what the emulator itself has taken in the process so far.
    """

    def __init__(self, phase: str, own_bytes: int = 0) -> None:
        device_core().emu_host_peak.restype = ctypes.c_int64
        device_core().emu_host_watch()
        self._phase = phase
        self._own_bytes = own_bytes
        self._peaks: dict[str, int] = {}
        self._workers: dict[str, int] = {}
        self._next_look_s = 0.0

    @guarded("the memory of the host")
    def enter(self, phase: str) -> None:
        """Note that another phase may begin."""
        if phase != self._phase:
            self._end_phase()
            self._phase = phase
            self._next_look_s = 0.0  # workers that are there now are those of this phase
        self._look()

    @guarded("the memory of the host")
    def result(self) -> dict[str, Any]:
        """By phase: the peaks of this process and of its workers, in bytes."""
        self._next_look_s = 0.0
        self._look()
        self._end_phase()
        return {
            "phases": {
                phase: (max(0, peak), self._workers.get(phase, 0))
                for phase, peak in self._peaks.items()
            },
            "own_bytes": self._taken_bytes(),
        }

    def _end_phase(self) -> None:
        peak = device_core().emu_host_peak() - self._taken_bytes()
        self._peaks[self._phase] = max(peak, self._peaks.get(self._phase, 0))

    def _taken_bytes(self) -> int:
        """Memory of the emulator itself: its modules, and the history of PyTorch's allocator."""
        stats = torch.cuda.memory_stats() if uses_cuda() else {}
        return self._own_bytes + _HISTORY_BYTES * int(stats.get("allocation.all.allocated", 0))

    def _look(self) -> None:
        """Measure what the processes below this one add to it."""
        started = time.monotonic()
        if started < self._next_look_s:
            return
        below = descendants(os.getpid())
        # What n processes share counts 1/n in each.
        files = [f"/proc/{pid}/smaps_rollup" for pid in (os.getpid(), *below) if below]
        all_bytes = 1024 * sum(sum(_facts(file, _COUNTED)) for file in files)
        more = max(0, all_bytes - anonymous_bytes())
        self._workers[self._phase] = max(more, self._workers.get(self._phase, 0))
        ended = time.monotonic()
        self._next_look_s = ended + max(LOOK_EVERY_S, RARER * (ended - started))


def note_memory(memory: mmap.mmap) -> None:
    """Count a mapping of an emulated process as if it were written, until it is unmapped."""
    if LIBRARIES_VARIABLE not in os.environ:
        return
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    device = device_core()
    device.emu_host_add(address, ctypes.c_size_t(len(memory)))
    weakref.finalize(memory, device.emu_host_remove, address).atexit = False


def anonymous_bytes() -> int:
    """Anonymous memory of this process that is resident."""
    return 1024 * sum(_facts("/proc/self/status", ("RssAnon",)))


def _facts(path: str, names: tuple[str, ...]) -> list[int]:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:  # it has ended
        return []
    return [int(line.split()[1]) for line in lines if line.partition(":")[0] in names]
