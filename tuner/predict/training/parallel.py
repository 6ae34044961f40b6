"""Training on several ranks: DistributedDataParallel, FSDP2, ZeRO, and layers that are offloaded.

A trace and a real run wrap the model here with the same code. What differs is the process group,
which whoever opens the session has set up: gloo or NCCL between real ranks, PyTorch's "fake" one
in a trace.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tuner.core.errors import InputError, UnavailableError
from tuner.core.setup.distributed_knobs import BUCKET_CAP_MIB, Parallelism
from tuner.predict.training import Environment, Machine

_MESH = "dp_shard"
_COPIES = "dp_replicate"


@dataclass(frozen=True, slots=True)
class Sharding:
    """The sharding of a model: `by_trainer`, or by a hand-written loop.

    Layers run in `dtype`, by default in that of their weights. Without `reshard_after_forward` the
    gathered weights of a layer stay until its backward pass has ended. With `sync_each_batch`
    gradients are shared out after each micro-step, else kept whole until the last.
    """

    by_trainer: bool = True
    dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    sync_each_batch: bool = False


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
    # As PyTorch's documentation and torchtitan: each layer, then what is left. Gradients are
    # reduced in fp32 where layers run in less.
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if sharding.dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=sharding.dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(
            layer, mesh=mesh, mp_policy=policy, reshard_after_forward=sharding.reshard_after_forward
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
    """The part of `Accelerator` that accelerate's preparation of a model asks for."""

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
    from accelerate.utils.dataclasses import get_module_class_from_name
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    # accelerate stops at a class that a model's text alone is without: people name the others.
    classes = sorted(getattr(model, "_no_split_modules", None) or ())
    present = [name for name in classes if get_module_class_from_name(model, name) is not None]
    model.named_layers = () if present == classes else tuple(present)  # type: ignore[assignment]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=sharding.reshard_after_forward,
        transformer_cls_names_to_wrap=present or None,
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


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks of a language model, first to last, without those of a vision tower beside it.

    Raises `InputError` for a model without.
    """
    find: Any = getattr(model, "get_decoder", None)
    decoder: nn.Module = find() if find is not None else model
    lists = [list(module) for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise InputError("offload needs a model made of layers, and this model has no list of them")
    return max(lists, key=len)


def keep_on_host(layers: Iterable[nn.Module], device: str) -> None:
    """Let the frozen weights of `layers` (on the host) be copied to `device` for each use.

    accelerate's hooks do the copying, as they do for what a `device_map` of `from_pretrained`
    puts on the processor. Trainable weights, the adapters, move to the device for good.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for layer in layers:
        for module in list(layer.modules()):
            own = list(module.parameters(recurse=False))
            if any(parameter.requires_grad for parameter in own):
                module.to(device)
            elif own:
                add_hook_to_module(module, AlignDevicesHook(device, offload=True))


def move_all_but(model: nn.Module, kept: Iterable[nn.Module], device: str) -> None:
    """Move the tensors of all modules of `model` to `device`, except those of `kept`."""
    stays = {id(module) for layer in kept for module in layer.modules()}
    for module in model.modules():
        if id(module) in stays:
            continue
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


PACKAGE = "deepspeed"


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """The configuration given to DeepSpeed; the rest are DeepSpeed's defaults."""

    stage: int
    micro_batch: int
    grad_accum: int
    gradient_clipping: float
    mixed_precision: str
    reduce_bucket_size: int

    def as_json(self) -> dict[str, Any]:
        """DeepSpeed's settings (`deepspeed_config`)."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.grad_accum,
            "gradient_clipping": self.gradient_clipping,
            "bf16": {"enabled": self.mixed_precision == "bf16"},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": self.reduce_bucket_size,
            },
            # As accelerate sets it where a program brings its optimizer.
            "zero_allow_untested_optimizer": True,
        }


def require_deepspeed() -> Any:
    """The package. Raises `UnavailableError` where it is not installed."""
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        raise UnavailableError(
            f"ZeRO is DeepSpeed's, which is not here: {error}",
            hint="pip install deepspeed; a program of yours can be emulated (tuner emulate)",
        ) from error


def share_weights(model: nn.Module, environment: Environment, settings: ZeroSettings) -> None:
    """Leave each rank its share of the weights, as `deepspeed.zero.Init` does for Trainer.

    They are in the type that will run. A model on the meta device gets its weights in host memory
    first, module by module; in a trace it gets them nowhere.
    """
    deepspeed = require_deepspeed()
    if settings.mixed_precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    if not isinstance(environment, Machine):
        environment.materialize(nn.Module())
    elif any(parameter.is_meta for parameter in model.parameters()):
        environment.materialize(model, [m for m in model.modules() if not [*m.children()]])
    deepspeed.zero.Init(module=model, config_dict_or_path=settings.as_json())
    for buffer in model.buffers():
        buffer.data = buffer.data.to(environment.device)


class _ZeroEngine:
    """DeepSpeed's engine around `model`, from when there is an optimizer on."""

    def __init__(self, model: nn.Module, settings: ZeroSettings) -> None:
        self._deepspeed = require_deepspeed()
        self._model = model
        self._settings = settings
        self._engine: Any = None

    def take(self, optimizer: Any) -> Any:
        """Share model and optimizer between the ranks; what is called in the model's place."""
        self._engine, *_ = self._deepspeed.initialize(
            model=self._model, optimizer=optimizer, config=self._settings.as_json()
        )
        return self._engine

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Gradients, which the engine exchanges."""
        self._engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()


@runtime_checkable
class _Traced(Protocol):
    """An environment without values, which stands in for what ranks exchange."""

    def communicate(self, bucket: Any) -> Any:
        """Note a `GradBucket`, and give it back as a future, as communication hooks do."""


class Ranks:
    """One rank's stand-in for its model, which exchanges gradients.

    The model keeps its parameters; under fsdp2 they have become shards. `number` is the rank's.
    """

    def __init__(
        self,
        called: Any,
        parallelism: Parallelism,
        engine: _ZeroEngine | None = None,
        *,
        sync_each_batch: bool = False,
    ) -> None:
        self.called = called
        self.number = dist.get_rank() if parallelism.ranks > 1 else 0
        self._parallelism = parallelism
        self._engine = engine
        self._sync_each_batch = sync_each_batch
        self._is_last = True

    @classmethod
    def alone(cls, model: Any) -> Ranks:
        """One rank, which exchanges nothing."""
        return cls(model, Parallelism())

    def take(self, optimizer: Any) -> None:
        """The optimizer is there: from now on the ranks may share its state."""
        if self._engine is not None:
            self.called = self._engine.take(optimizer)

    def backward(self, loss: Any) -> None:
        """The backward pass of a micro-step."""
        if self._engine is None:
            torch.autograd.backward(loss)
        else:
            self._engine.backward(loss, is_last=self._is_last)

    def update(self) -> bool:
        """Update, clipping included; False if the caller has to."""
        if self._engine is None:
            return False
        self._engine.step()
        return True

    def exchange(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-step; gradients travel in the last one only.

        ZeRO's second and third stage exchange them in each, and FSDP2 with `sync_each_batch`.
        """
        self._is_last = is_last
        if self._parallelism.ranks == 1 or self._engine is not None:
            return contextlib.nullcontext()
        if self._parallelism.is_sharded:
            self.called.set_requires_gradient_sync(is_last or self._sync_each_batch)
            return contextlib.nullcontext()
        context: AbstractContextManager[None] = (
            contextlib.nullcontext() if is_last else self.called.no_sync()
        )
        return context


def import_strategy(parallelism: Parallelism) -> None:
    """Import the libraries that share a model between ranks, before memory is counted.

    Raises `UnavailableError` where DeepSpeed is asked for and not installed.
    """
    if parallelism.zero_stage:
        require_deepspeed()
    elif parallelism.is_sharded:
        for name in ("torch.distributed.fsdp", "accelerate.utils.fsdp_utils"):
            importlib.import_module(name)


def distribute(
    model: Any,
    parallelism: Parallelism,
    environment: Environment,
    *,
    may_have_idle: bool,
    sharding: Sharding,
    zero: ZeroSettings,
) -> Ranks:
    """Wrap `model` for the ranks of the process group that there is.

    `may_have_idle` says that a backward pass may leave parameters out, which costs a search.
    Under fsdp2 a model without weights, on the meta device, gets its shards on the environment's.
    Under ZeRO that waits for the optimizer (`Ranks.take`).
    """
    if parallelism.ranks == 1:
        return Ranks.alone(model)
    device = environment.device
    if parallelism.zero_stage:
        return Ranks(model, parallelism, _ZeroEngine(model, zero))
    if parallelism.is_sharded:
        called = shard(model, device, sharding, group=parallelism.group)
        if any(parameter.is_meta for parameter in called.parameters()):
            environment.materialize(called)
        return Ranks(called, parallelism, sync_each_batch=sharding.sync_each_batch)
    with _comparing_nothing() if device == "meta" else contextlib.nullcontext():
        # As Trainer wraps a model: PyTorch's defaults, and a search for idle parameters if needed.
        from torch.nn.parallel import DistributedDataParallel

        on_gpu = torch.device(device).type == "cuda"
        called = DistributedDataParallel(
            model,
            device_ids=[torch.device(device)] if on_gpu else None,
            bucket_cap_mb=BUCKET_CAP_MIB,
            find_unused_parameters=may_have_idle,
        )
    if isinstance(environment, _Traced):
        # DDP reads annotations of a hook, and refuses those that are text.
        called.register_comm_hook(environment, lambda traced, bucket: traced.communicate(bucket))
        called.logger = _NoStatistics()
    return Ranks(called, parallelism)


class _NoStatistics:
    """In place of DDP's logger, which warns of devices without timers, past Python's filters."""

    def set_runtime_stats_and_log(self) -> None:
        """There are no times."""


@contextlib.contextmanager
def _comparing_nothing() -> Iterator[None]:
    """In a trace ranks cannot compare the shapes of their parameters: there are no values."""
    import torch.nn.parallel.distributed as ddp

    name = "_verify_param_shape_across_processes"
    with mock.patch.object(ddp, name, return_value=None):
        yield
