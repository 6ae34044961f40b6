"""Importing libraries that would take a part of the GPU while they are imported."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from unittest import mock

from tuner.core.meanwhile import environment
from tuner.core.nvml import device_identity

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
    import torch

    with environment(ASK_DRIVER):
        identity = device_identity() if torch.cuda.is_available() else None
        if identity is None:
            yield
            return
        capability = identity.compute_capability
        with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
            yield
