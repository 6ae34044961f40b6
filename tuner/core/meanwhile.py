"""Temporary changes of this process: environment, loggers, garbage collection, careful imports."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

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
    with without_context():
        importlib.import_module("bitsandbytes")


@contextlib.contextmanager
def without_context() -> Iterator[None]:
    """Libraries that are imported inside create no CUDA context.

    bitsandbytes asks for the compute capability while it is imported, for which PyTorch creates
    one, and CUDA does not survive a fork. The driver's management library answers in PyTorch's
    place.
    """
    from unittest import mock  # imports asyncio

    import torch

    with environment(ASK_DRIVER):
        identity = device_identity() if torch.cuda.is_available() else None
        if identity is None:
            yield
            return
        capability = identity.compute_capability
        with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
            yield
