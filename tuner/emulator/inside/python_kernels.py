"""Keeps the mode at work inside kernels that packages write in Python (bitsandbytes, flash-attn).

PyTorch calls such a kernel from within an operator, where no mode is left: what it computes of
integers, and what it asks of values, would pass unseen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tuner.emulator.inside.mode import EmulatorMode

_DEVICE_KEYS = ("CUDA", "CompositeExplicitAutograd")


def follow_python_kernels(mode: EmulatorMode) -> None:
    """From now on, kernels that are registered for CUDA run with `mode`."""
    registry: Any = torch.library.Library
    register = registry.impl

    @functools.wraps(register)
    def register_followed(
        library: Any, name: Any, kernel: Any, dispatch_key: str = "", **options: Any
    ) -> Any:
        if callable(kernel) and dispatch_key in _DEVICE_KEYS and not options.get("with_keyset"):
            kernel = _followed(kernel, mode)
        return register(library, name, kernel, dispatch_key, **options)

    registry.impl = register_followed


def _followed(kernel: Callable[..., Any], mode: EmulatorMode) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def with_mode(*args: Any, **kwargs: Any) -> Any:
        if mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            return kernel(*args, **kwargs)
        # The operator is priced as a whole: what it is made of is not counted again.
        observer, before = mode.observer, mode.before
        mode.observer = mode.before = None
        torch._C._push_on_torch_dispatch_stack(mode)
        try:
            return kernel(*args, **kwargs)
        finally:
            torch._C._pop_torch_dispatch_stack(None)
            mode.observer, mode.before = observer, before

    return with_mode
