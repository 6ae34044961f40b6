"""Training on several ranks: DistributedDataParallel, FSDP2 (`sharding`), or ZeRO.

A trace and a real run wrap the model here with the same code. What differs is the process group,
which whoever opens the session has set up: gloo or NCCL between real ranks, PyTorch's "fake" one
in a trace.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tuner.core.setup.distributed_knobs import BUCKET_CAP_MIB, Parallelism
from tuner.predict.training.base import Environment
from tuner.predict.training.sharding import (
    Sharding,
    ZeroEngine,
    ZeroSettings,
    require_deepspeed,
    shard,
)


@runtime_checkable
class Traced(Protocol):
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
        engine: ZeroEngine | None = None,
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
        return Ranks(model, parallelism, ZeroEngine(model, zero))
    if parallelism.is_sharded:
        called = shard(model, device, sharding, group=parallelism.group)
        if any(parameter.is_meta for parameter in called.parameters()):
            environment.materialize(called)
        return Ranks(called, parallelism, sync_each_batch=sharding.sync_each_batch)
    with _comparing_nothing() if device == "meta" else contextlib.nullcontext():
        called = _replicate(model, device, may_have_idle=may_have_idle)
    if isinstance(environment, Traced):
        # DDP reads annotations of a hook, and refuses those that are text.
        called.register_comm_hook(environment, lambda traced, bucket: traced.communicate(bucket))
        called.logger = _NoStatistics()
    return Ranks(called, parallelism)


class _NoStatistics:
    """In place of DDP's logger, which warns of devices without timers, past Python's filters."""

    def set_runtime_stats_and_log(self) -> None:
        """There are no times."""


def _replicate(model: nn.Module, device: str, *, may_have_idle: bool) -> Any:
    """As Trainer wraps a model: PyTorch's defaults, and a search for idle parameters if needed.

    Gradients are reduced of trainable parameters only, and start-up broadcasts all of them.
    """
    from torch.nn.parallel import DistributedDataParallel

    on_gpu = torch.device(device).type == "cuda"
    return DistributedDataParallel(
        model,
        device_ids=[torch.device(device)] if on_gpu else None,
        bucket_cap_mb=BUCKET_CAP_MIB,
        find_unused_parameters=may_have_idle,
    )


@contextlib.contextmanager
def _comparing_nothing() -> Iterator[None]:
    """In a trace ranks cannot compare the shapes of their parameters: there are no values."""
    import torch.nn.parallel.distributed as ddp

    name = "_verify_param_shape_across_processes"
    with mock.patch.object(ddp, name, return_value=None):
        yield
