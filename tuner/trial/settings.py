"""Knobs that act on a whole process: the allocator's settings, cuDNN's search for kernels."""

from __future__ import annotations

import os

import torch

from tuner.core.errors import InputError
from tuner.core.records import Configuration

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The second is the older name; versions of PyTorch differ in which they read first."""


def apply_settings(configuration: Configuration, device: str) -> tuple[str, ...]:
    """Put the process-wide knobs of `configuration` in force; returns notes for the reader.

    Call it before `device` is touched: the allocator reads its settings once. Raises
    `InputError` for settings that PyTorch does not take. Whether a knob can act on `device` at
    all is the workload's to say.
    """
    allocator = str(configuration.get("allocator", ""))
    notes = []
    if device != "cpu":
        inherited = next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), None)
        if allocator:
            set_allocator(allocator)
        elif inherited:
            notes.append(f"the environment sets the allocator: {inherited}")
    torch.backends.cudnn.benchmark = bool(configuration.get("cudnn_benchmark", False))
    if torch.backends.cudnn.benchmark:
        notes.append("cudnn_benchmark acts on convolutions only")
    return tuple(notes)


def set_allocator(text: str) -> None:
    """Settings of PyTorch's caching allocator, for this process and those that it starts.

    They are set directly too: the variables have been read where torch was imported before a
    fork. Raises `InputError` with PyTorch's own words for text that it does not take.
    """
    # PyTorch has no public function for it; the second is what versions before 2.10 have.
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    try:
        (setter or torch.cuda.memory._set_allocator_settings)(text)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"allocator {text!r} is not a setting of PyTorch's allocator",
            hint=f"{str(error).splitlines()[0][:200]}; write it as in PYTORCH_CUDA_ALLOC_CONF, "
            "for example expandable_segments:True",
        ) from error
    for name in ALLOCATOR_VARIABLES:
        os.environ[name] = text
