"""Knobs of the machine and of the process: they act in real trials, and predictions know none.

A configuration has them only where its space names them.
"""

from __future__ import annotations

from typing import Any

from tuner.core.setup.knob_schema import KnobSchema

ALLOCATOR_OPTIONS = (
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "roundup_power2_divisions",
)
"""PyTorch documentation, CUDA semantics, "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF".
The allocator passes over names that it does not know, so they must be checked here."""

_MACHINE: dict[str, Any] = {"optional": True, "modelled": False}

MACHINE: tuple[KnobSchema, ...] = (
    KnobSchema(
        "torch_compile",
        "bool",
        "compile the model with torch.compile, as Trainer's torch_compile=True",
        default=False,
        **_MACHINE,
    ),
    KnobSchema(
        "liger",
        "bool",
        "Liger's Triton kernels, as Trainer's use_liger_kernel=True; needs liger-kernel and a GPU",
        default=False,
        **_MACHINE,
    ),
    KnobSchema(
        "offload",
        "float",
        "part of the layers, from the last one, whose frozen weights stay in host memory and "
        "travel to the GPU for each use, from 0 to 1",
        default=0.0,
        minimum=0,
        below=1 + 1e-9,
        **_MACHINE,
    ),
    KnobSchema(
        "allocator",
        "text",
        "PYTORCH_CUDA_ALLOC_CONF; nothing is PyTorch's default",
        default="",
        allowed=ALLOCATOR_OPTIONS,
        **_MACHINE,
    ),
    KnobSchema(
        "cudnn_benchmark",
        "bool",
        "torch.backends.cudnn.benchmark: acts on convolutions, which most language models lack",
        default=False,
        **_MACHINE,
    ),
    KnobSchema(
        "num_workers",
        "int",
        "processes of the data loader; 0 loads in the training process",
        default=0,
        minimum=0,
        below=257,
        **_MACHINE,
    ),
    KnobSchema(
        "pin_memory", "bool", "batches in page-locked host memory", default=False, **_MACHINE
    ),
    KnobSchema(
        "prefetch_factor",
        "int",
        "batches that each process of the data loader prepares ahead",
        default=2,
        minimum=1,
        **_MACHINE,
    ),
    KnobSchema(
        "persistent_workers",
        "bool",
        "processes of the data loader outlive an epoch",
        default=False,
        **_MACHINE,
    ),
)
