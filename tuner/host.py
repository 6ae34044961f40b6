"""What the operating system says of this machine: its processor, and what a process may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CPU_FACTS = Path("/proc/cpuinfo")
_MEMORY_FACTS = Path("/proc/meminfo")
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),  # version 2
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1
)


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
    # "max" is no limit; version 1 writes no limit as a number larger than any memory.
    return min([_memory_bytes(), *(int(text) for text in limits if text.isdigit())])


def usable_cpus() -> int:
    """Processors that this process may run on: in a container less than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int:
    if _MEMORY_FACTS.is_file():
        for line in _MEMORY_FACTS.read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
