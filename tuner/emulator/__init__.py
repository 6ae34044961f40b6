"""An emulated GPU: runs CUDA programs, unchanged, on stand-ins for NVIDIA's libraries.

PyTorch's real allocator, dispatcher and optimizers run; kernels do nothing. Its numbers are called
*emulated*: see docs/emulator.md. `Machine(gpu).run(command)` returns an `Emulation`, and
`Machine(gpu).call(function)` a `Called`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.emulator.calls import Called as Called
    from tuner.emulator.emulation import Emulation as Emulation
    from tuner.emulator.machine import Machine as Machine

_MODULES = {"Machine": "machine", "Emulation": "emulation", "Called": "calls"}


def __getattr__(name: str) -> Any:
    """A public class, whose module is loaded at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
