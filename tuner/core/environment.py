"""The environment variables that processes of this program are started with."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

DEVICE_ORDER: Mapping[str, str] = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The driver's order of devices, which NVML has too; CUDA's own puts the fastest first."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def trial_environment(threads: int) -> dict[str, str]:
    """What a trial sees in a search and by hand: `threads` processors, the driver's device order.

    A trial computes with as many threads as it has processors, whatever the user's shell says:
    two trials of one configuration are to measure the same.
    """
    return {**DEVICE_ORDER, **dict.fromkeys(THREAD_VARIABLES, str(threads))}


def search_path() -> str:
    """The value of PYTHONPATH by which the modules that are found here are found there."""
    return os.pathsep.join(path or str(Path.cwd()) for path in sys.path)


def joined(*parts: str | None) -> str:
    """Values of PYTHONPATH, one after the other; those that are empty are left out."""
    return os.pathsep.join(filter(None, parts))
