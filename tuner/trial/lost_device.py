"""Recognises errors of a GPU that is gone: no trial is at fault, and none will run there."""

from __future__ import annotations

import re

# The driver's log (Xid 79), and NVML's texts and names where a device does not answer any more
# until it is reset (nvml.h: NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED).
_LOST_DEVICE = re.compile(
    r"fallen off the bus|GPU is lost|GPU_IS_LOST|GPU requires reset|RESET_REQUIRED", re.IGNORECASE
)


def says_device_is_lost(text: str) -> bool:
    """Whether an error says that its device is gone until somebody resets it."""
    return _LOST_DEVICE.search(text) is not None
