"""FSDP2: each rank keeps a share of every weight, and gathers a layer's just before it runs.

Two ways to wrap a model are in use. transformers' Trainer leaves it to accelerate, whose own code
runs here; loops of one's own follow PyTorch's documentation and torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tuner.predict.training.offload import decoder_layers

_MESH = "dp_shard"
_COPIES = "dp_replicate"


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is sharded: `by_trainer`, or by a loop of one's own.

    Layers run in `dtype`, by default in that of their weights. Without `reshard_after_forward` the
    gathered weights of a layer stay until its backward pass has ended.
    """

    by_trainer: bool = True
    dtype: torch.dtype | None = None
    reshard_after_forward: bool = True


def shard(model: nn.Module, device: str, sharding: Sharding, *, group: int) -> Any:
    """The model with its parameters sharded between `group` ranks in a row, where they are.

    With more ranks than that, each such group has a copy of the model (HSDP): the mesh has two
    dimensions, as PyTorch's documentation, torchtitan and accelerate make it.
    On the meta device nothing is allocated. Weights on the host go to `device` layer by layer.
    """
    from torch.distributed.device_mesh import init_device_mesh

    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(device)  # fully_shard asks for no other
    copies = dist.get_world_size() // group
    sizes, names = ((group,), (_MESH,)) if copies == 1 else ((copies, group), (_COPIES, _MESH))
    mesh = init_device_mesh("cpu" if kind == "meta" else kind, sizes, mesh_dim_names=names)
    if sharding.by_trainer:
        return _as_accelerate(model, mesh, device, sharding)
    return _by_layer(model, mesh, sharding)


def _by_layer(model: nn.Module, mesh: Any, sharding: Sharding) -> Any:
    """As PyTorch's documentation and torchtitan: each layer, then what is left.

    Gradients are reduced in fp32 where layers run in less.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if sharding.dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=sharding.dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=sharding.reshard_after_forward,
        )
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@dataclass(frozen=True, slots=True)
class _State:
    """`Accelerator.state`."""

    fsdp_plugin: Any


@dataclass(frozen=True, slots=True)
class _Dimensions:
    """`Accelerator.parallelism_config`."""

    fsdp_dim_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Accelerator:
    """What accelerate's preparation of a model asks its `Accelerator` for."""

    state: _State
    torch_device_mesh: Any
    device: torch.device
    mixed_precision: str
    parallelism_config: _Dimensions
    is_main_process: bool = False
    """Otherwise it logs, which needs a real one."""


def _as_accelerate(model: nn.Module, mesh: Any, device: str, sharding: Sharding) -> Any:
    """As Trainer and `accelerate launch` with fsdp_version 2 and TRANSFORMER_BASED_WRAP.

    Layers, embedding and output head are units of their own. Under mixed precision accelerate
    widens trainable weights to fp32 and reduces gradients in the narrow type.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=sharding.reshard_after_forward,
        cpu_ram_efficient_loading=False,
    )
    precision = "no"
    if sharding.dtype is not None:
        precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}[sharding.dtype]
        plugin.set_mixed_precision(precision)
    dimensions = _Dimensions(tuple(mesh.mesh_dim_names))
    accelerator = _Accelerator(_State(plugin), mesh, torch.device(device), precision, dimensions)
    # Values that it would load afterwards, if only the first rank had them.
    with mock.patch.object(model, "state_dict", dict):
        return fsdp2_prepare_model(accelerator, model)
