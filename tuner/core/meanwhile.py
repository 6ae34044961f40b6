"""Temporary changes of this process: environment, loggers, garbage collection, careful imports."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tuner.core.nvml import device_identity


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """These variables have these values inside, and are as before afterwards."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def log_level(level: int, names: Sequence[str]) -> Iterator[None]:
    """The loggers of these names let through what is of `level` or above inside."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, level_before in zip(loggers, before, strict=True):
            logger.setLevel(level_before)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Python looks for no cycles inside: where many objects are made that stay, it takes long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


ASK_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Asking whether there is a device must not start CUDA either (PyTorch, "CUDA semantics")."""


def import_bitsandbytes() -> None:
    """Import bitsandbytes without touching a device.

    peft imports it too, so that this comes before peft. A process that only predicts would hold
    some 0.3 GiB of the first GPU else, and no trial could be measured beside it.
    """
    if "bitsandbytes" in sys.modules:
        return
    with without_context(), compiled_at_first_call():
        importlib.import_module("bitsandbytes")


@contextlib.contextmanager
def compiled_at_first_call() -> Iterator[None]:
    """`torch.compile` imports the compiler at the first call of a function, not while decorating.

    bitsandbytes 0.50 decorates four functions that no trace calls, and the compiler takes nearly as
    long to import as torch and transformers.
    """
    from unittest import mock

    import torch

    compiled = torch.compile

    def at_first_call(function: Callable[..., Any] | None = None, **how: Any) -> Any:
        if function is None:
            return functools.partial(at_first_call, **how)

        @functools.cache
        def made() -> Callable[..., Any]:
            return compiled(function, **how)

        @functools.wraps(function)
        def calling(*given: Any, **named: Any) -> Any:
            return made()(*given, **named)

        return calling

    with mock.patch.object(torch, "compile", at_first_call):
        yield


@contextlib.contextmanager
def without_context() -> Iterator[None]:
    """Libraries that are imported inside create no CUDA context.

    bitsandbytes asks for the compute capability while it is imported, for which PyTorch creates
    one on each GPU, and CUDA does not survive a fork. The driver's management library answers in
    PyTorch's place; where it has no answer, there is no GPU meanwhile.
    """
    from unittest import mock  # imports asyncio

    import torch

    name: str = "is_available"
    answer: object = False
    with contextlib.suppress(LookupError):  # lost, or hidden by CUDA_VISIBLE_DEVICES
        if (identity := device_identity()) is not None:
            name, answer = "get_device_capability", identity.compute_capability
    with environment(ASK_DRIVER), mock.patch.object(torch.cuda, name, return_value=answer):
        yield
