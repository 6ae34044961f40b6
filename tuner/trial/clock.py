"""The clock that steps are timed with: this machine's, or that of an emulated device."""

from __future__ import annotations

import time
from collections.abc import Callable

from tuner.emulator.here import emulated_clock, is_emulated


def step_clock(device: str) -> Callable[[], float]:
    """Seconds since some moment, for steps on `device`, a torch device string."""
    return emulated_clock() if is_emulated() and device != "cpu" else time.perf_counter
