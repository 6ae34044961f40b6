"""Knobs that every workload of the project has, and the optimizers that they can name.

Names of optimizers are those of transformers' `OptimizerNames`; a row says what its Trainer builds
for the name (`Trainer.get_optimizer_cls_and_kwargs`, transformers 5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The class `path` ("package.module:Name"), made of parameters, a learning rate and `options`.

    `recipe` is what torchtune's recipes say of it beside the class, where that differs from
    `options`. `can_shard` is false where the class does not know parameters that FSDP2 has
    sharded: it reads raw memory, or makes whole tensors of its own. One that `needs_shapes` takes
    what follows from the shapes of parameters, not from their sizes alone. Where the class takes
    only the matrices of hidden layers, `rest` names the optimizer of all other parameters.
    """

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    can_shard: bool = True
    needs_shapes: bool = False
    rest: str | None = None


_PAGED = {"is_paged": True}
_FIXED_RATE = {"scale_parameter": False, "relative_step": False}


OPTIMIZERS: Mapping[str, Optimizer] = {
    # The multi-tensor implementation, PyTorch's default on CUDA.
    "adamw_torch": Optimizer("torch.optim:AdamW", {"foreach": True}, {"fused": False}),
    "adamw_torch_fused": Optimizer("torch.optim:AdamW", {"fused": True}, {"fused": True}),
    "adamw_8bit": Optimizer("bitsandbytes.optim:AdamW8bit", can_shard=False),
    "adamw_bnb_8bit": Optimizer("bitsandbytes.optim:AdamW8bit", can_shard=False),  # another name
    "paged_adamw_8bit": Optimizer("bitsandbytes.optim:PagedAdamW8bit", can_shard=False),
    "paged_adamw_32bit": Optimizer("bitsandbytes.optim:PagedAdamW32bit", can_shard=False),
    # In fp32 whatever the weights are in; a row and a column of numbers for each matrix.
    "adafactor": Optimizer(
        "transformers.optimization:Adafactor",
        _FIXED_RATE,
        _FIXED_RATE,
        can_shard=False,
        needs_shapes=True,
    ),
    "lion_32bit": Optimizer("bitsandbytes.optim:Lion", can_shard=False),
    "lion_8bit": Optimizer("bitsandbytes.optim:Lion8bit", can_shard=False),
    "paged_lion_32bit": Optimizer("bitsandbytes.optim:Lion", _PAGED, _PAGED, can_shard=False),
    "paged_lion_8bit": Optimizer("bitsandbytes.optim:Lion8bit", _PAGED, _PAGED, can_shard=False),
    # A momentum for each matrix; the Newton-Schulz iteration works on a copy in bf16.
    "muon": Optimizer("torch.optim:Muon", can_shard=False, needs_shapes=True, rest="adamw_torch"),
    "sgd": Optimizer("torch.optim:SGD", {"foreach": True}),
    "rmsprop": Optimizer("torch.optim:RMSprop", {"foreach": True}),
}

_LOW_RANK = "its states are of a low rank: adafactor, whose are smaller still, comes nearest"
_IN_BACKWARD = "it updates in the backward pass: sgd comes nearest, less the gradients"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor"), _LOW_RANK),
    **dict.fromkeys(("apollo_adamw", "q_galore_adamw8bit"), _LOW_RANK),
    **dict.fromkeys(("lomo", "adalomo", "galore_adamw_layerwise"), _IN_BACKWARD),
    "adamw_torch_8bit": "adamw_8bit, bitsandbytes' in place of torchao's, comes nearest",
    "adamw_torch_4bit": "adamw_8bit, with twice the bits, comes nearest",
}
"""Optimizers that are not predicted, with what comes nearest."""
