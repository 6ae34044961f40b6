"""Knobs that every workload of the project has: batch, process, data loader, and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.core.setup.schema import Group, knob

QUANTIZED = ("nf4", "int8")
"""Precisions that bitsandbytes quantises weights to."""

TORCH_DTYPES: Mapping[str, str] = {
    "fp32": "float32",
    "tf32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}
"""PyTorch's name of the dtype behind each precision that isn't quantised."""

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


@dataclass(frozen=True, slots=True)
class Batch(Group):
    """Samples of a forward pass, of an optimizer step, and the micro-steps between."""

    micro: int = knob(
        "micro_batch", "samples in one forward and backward pass on one GPU", default=1, minimum=1
    )
    effective: int = knob(
        "effective_batch",
        "samples in one optimizer step: micro_batch * grad_accum (* gpus_per_trial)",
        default=16,
        minimum=1,
    )
    accumulation: int = knob(
        "grad_accum",
        "micro-steps whose gradients are added up before an optimizer step",
        default=16,
        default_rule="effective_batch // micro_batch",
        minimum=1,
    )


@dataclass(frozen=True, slots=True)
class Process(Group):
    """Settings of the process: predictions know the allocator's."""

    compile: bool = knob(
        "torch_compile",
        "compile the model with torch.compile, as Trainer's torch_compile=True",
        default=False,
        optional=True,
        modelled=False,
    )
    liger: bool = knob(
        "liger",
        "Liger's Triton kernels, as Trainer's use_liger_kernel=True; needs liger-kernel and a GPU",
        default=False,
        optional=True,
    )
    offload: float = knob(
        "offload",
        "part of the layers, from the last one, whose frozen weights stay in host "
        "memory and travel to the GPU for each use, from 0 to 1",
        default=0.0,
        minimum=0,
        below=1.000000001,
        optional=True,
        modelled=False,
    )
    allocator: str = knob(
        "allocator",
        "PYTORCH_CUDA_ALLOC_CONF; nothing is PyTorch's default",
        default="",
        kind="text",
        allowed=ALLOCATOR_OPTIONS,
        optional=True,
    )
    cudnn_benchmark: bool = knob(
        "cudnn_benchmark",
        "torch.backends.cudnn.benchmark: acts on convolutions, which most language models lack",
        default=False,
        optional=True,
        modelled=False,
    )


@dataclass(frozen=True, slots=True)
class Loader(Group):
    """The knobs of `torch.utils.data.DataLoader`, with its own names."""

    num_workers: int = knob(
        "num_workers",
        "processes of the data loader; 0 loads in the training process",
        default=0,
        minimum=0,
        below=257,
        optional=True,
        modelled=False,
    )
    pin_memory: bool = knob(
        "pin_memory",
        "batches in page-locked host memory",
        default=False,
        optional=True,
        modelled=False,
    )
    prefetch_factor: int = knob(
        "prefetch_factor",
        "batches that each process of the data loader prepares ahead",
        default=2,
        minimum=1,
        optional=True,
        modelled=False,
    )
    persistent_workers: bool = knob(
        "persistent_workers",
        "processes of the data loader outlive an epoch",
        default=False,
        optional=True,
        modelled=False,
    )
