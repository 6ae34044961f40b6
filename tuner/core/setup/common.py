"""Knobs that every workload of the project has: batch, process, data loader, and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.core.setup.schema import Group, knob

QUANTIZED = ("nf4", "int8")
"""Precisions that bitsandbytes quantises weights to."""

TORCH_DTYPES: Mapping[str, str] = {
    "fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16",
}  # fmt: skip
"""PyTorch's name of the dtype behind each precision that isn't quantised."""

ALLOCATOR_OPTIONS = (
    "backend", "expandable_segments", "garbage_collection_threshold", "large_segment_size_mb",
    "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction",
    "pinned_num_register_threads", "pinned_use_background_threads",
    "pinned_use_cuda_host_register", "release_lock_on_cudamalloc", "roundup_power2_divisions",
)  # fmt: skip
"""PyTorch documentation, CUDA semantics, "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF".
The allocator passes over names that it does not know, so they must be checked here."""


@dataclass(frozen=True, slots=True)
class Batch(Group):
    """Samples of a forward pass, of an optimizer step, and the micro-steps between."""

    # fmt: off
    micro: int = knob("micro_batch", 1,
        "samples in one forward and backward pass on one GPU", minimum=1)
    effective: int = knob("effective_batch", 16,
        "samples in one optimizer step: micro_batch * grad_accum (* gpus_per_trial)", minimum=1)
    accumulation: int = knob("grad_accum", 16,
        "micro-steps whose gradients are added up before an optimizer step",
        default_rule="effective_batch // micro_batch", minimum=1)
    # fmt: on


@dataclass(frozen=True, slots=True)
class Process(Group):
    """Settings of the process: predictions know the allocator's."""

    # fmt: off
    compile: bool = knob("torch_compile", False,
        "compile the model with torch.compile, as Trainer's torch_compile=True",
        optional=True, modelled=False)
    liger: bool = knob("liger", False,
        "Liger's Triton kernels, as Trainer's use_liger_kernel=True; needs liger-kernel and a GPU",
        optional=True)
    offload: float = knob("offload", 0.0,
        "part of the layers, from the last one, whose frozen weights stay in host memory and "
        "travel to the GPU for each use, from 0 to 1",
        minimum=0, below=1.000000001, optional=True, modelled=False)
    allocator: str = knob("allocator", "", "PYTORCH_CUDA_ALLOC_CONF; nothing is PyTorch's default",
        kind="text", allowed=ALLOCATOR_OPTIONS, optional=True)
    cudnn_benchmark: bool = knob("cudnn_benchmark", False,
        "torch.backends.cudnn.benchmark: acts on convolutions, which most language models lack",
        optional=True, modelled=False)
    # fmt: on


@dataclass(frozen=True, slots=True)
class Loader(Group):
    """The knobs of `torch.utils.data.DataLoader`, with its own names."""

    # fmt: off
    num_workers: int = knob("num_workers", 0,
        "processes of the data loader; 0 loads in the training process",
        minimum=0, below=257, optional=True, modelled=False)
    pin_memory: bool = knob("pin_memory", False,
        "batches in page-locked host memory", optional=True, modelled=False)
    prefetch_factor: int = knob("prefetch_factor", 2,
        "batches that each process of the data loader prepares ahead",
        minimum=1, optional=True, modelled=False)
    persistent_workers: bool = knob("persistent_workers", False,
        "processes of the data loader outlive an epoch", optional=True, modelled=False)
    # fmt: on
