"""The environment variables that the processes of real trials are started with."""

from __future__ import annotations

from collections.abc import Mapping

DEVICE_ORDER: Mapping[str, str] = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The driver's order of devices, which NVML has too; CUDA's own puts the fastest first."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def trial_environment(threads: int) -> dict[str, str]:
    """What a trial sees in a search and by hand: `threads` processors, the driver's device order.

    A trial computes with as many threads as it has processors, whatever the user's shell says:
    two trials of one configuration are to measure the same.
    """
    return {**DEVICE_ORDER, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
