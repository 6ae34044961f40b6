"""The processor and memory of this machine, and the limits of a process, from the operating system.

psutil has no processor's name, no container's limit and no peak: the kernel's files do.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from tuner.core import nvml
from tuner.core.environment import this_python
from tuner.core.errors import UnavailableError
from tuner.core.processes import descendants
from tuner.core.units import KIB

_CPU_FACTS = Path("/proc/cpuinfo")
_MEMORY_FACTS = Path("/proc/meminfo")
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),  # version 2
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1
)

_CGROUP_USE = Path("/sys/fs/cgroup/memory.current")
_CGROUP_FACTS = Path("/sys/fs/cgroup/memory.stat")
_OWN_FACTS = Path("/proc/self/status")


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's malloc.h."""
_THRESHOLD_BYTES = 128 * 1024
"""Initial value of both thresholds in glibc."""


def find_program(name: str, path: str | None = None) -> str | None:
    """The path of a program: on PATH, else beside the Python that runs this; None where it is not.

    `python` is that Python itself where a machine has only `python3`. `path` takes the place of
    PATH.
    """
    found = shutil.which(name, path=path)
    if found is None and os.sep not in name:
        found = shutil.which(name, path=str(Path(this_python()).parent))
    return this_python() if found is None and name == "python" else found


def give_back_freed() -> None:
    """Let malloc give back to the kernel what is freed from now on, as it begins to do.

    glibc keeps ever larger blocks that a process frees and allocates again (mallopt(3),
    M_MMAP_THRESHOLD, "dynamic"). Ranks that share weights or gradients do so all the time, and what
    they take would grow from step to step. Another C library is left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            mallopt(parameter, _THRESHOLD_BYTES)


def cpu_name() -> str:
    """The processor's name as the kernel has it ("AMD EPYC 7B13"), else its architecture."""
    if _CPU_FACTS.is_file():
        for line in _CPU_FACTS.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_memory_bytes() -> int:
    """Memory that processes here may use: the container's limit where there is one, else all."""
    limits = [path.read_text().strip() for path in _CGROUP_LIMITS if path.is_file()]
    installed = _fact(_MEMORY_FACTS, "MemTotal:")
    if installed is None:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # "max" is no limit; version 1 writes no limit as a number larger than any memory.
    return min([installed, *(int(text) for text in limits if text.isdigit())])


def usable_cpus() -> int:
    """Processors that this process may run on: in a container less than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not tell.

    The kernel's estimate (proc(5), MemAvailable), and in a container no more than is left of its
    limit, file caches not counted as used.
    """
    available = _fact(_MEMORY_FACTS, "MemAvailable:")
    limit, used = usable_memory_bytes(), _cgroup_used_bytes()
    if available is None or used is None:
        return available
    return max(0, min(available, limit - used))


def _cgroup_used_bytes() -> int | None:
    if not (_CGROUP_USE.is_file() and _CGROUP_FACTS.is_file()):
        return None
    pairs = (line.split() for line in _CGROUP_FACTS.read_text().splitlines())
    facts = {name: int(value) for name, value in pairs}
    return int(_CGROUP_USE.read_text()) - facts.get("inactive_file", 0)


def _fact(path: Path, name: str) -> int | None:
    """A line such as "VmRSS: 12 kB" in a file of the kernel, in bytes; None without one."""
    try:
        lines = path.read_text().splitlines()
    except OSError:  # the system has no such file, or the process has ended
        return None
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith(name)), None)


def resident_bytes() -> int:
    """Memory of this process that is resident now (proc(5), VmRSS).

    Raises `UnavailableError` where the kernel does not tell.
    """
    return _own_fact("VmRSS:")


def peak_resident_bytes() -> int:
    """The most that was resident since the process began, or since the peak was set back."""
    return _own_fact("VmHWM:")


def data_bytes() -> int:
    """The private memory that this process asked for (VmData), which RLIMIT_DATA limits."""
    return _own_fact("VmData:")


def _own_fact(name: str) -> int:
    found = _fact(_OWN_FACTS, name)
    if found is None:
        raise UnavailableError(f"the kernel does not report {name[:-1]} of a process")
    return found


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
        """The reading is the growth of the whole device: in a container, the driver does not
        tell processes apart."""

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
    # psutil has no peak on Linux.
    known = [(_fact(Path(f"/proc/{pid}/status"), "VmHWM:"), pid) for pid in pids]
    living = [(peak, pid) for peak, pid in known if peak is not None]
    highest = max((peak for peak, _ in living), default=0)
    return highest if len(living) < 2 else max(highest, sum(_share_bytes(p) for _, p in living))


def _share_bytes(pid: int) -> int:
    import psutil  # a prediction never needs it

    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:  # it has ended
        return 0
