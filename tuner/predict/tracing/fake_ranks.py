"""A process group for traces: as many ranks as asked for, of which only this one exists.

FSDP2 allocates on streams of its own, and PyTorch's caching allocator gives what one stream has
freed to no other: the trace notes the stream of every allocation.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from tuner.core.errors import UnavailableError
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.predict.training.parallel import require_deepspeed

_MUCH_BYTES = 1 << 50
"""Memory that DeepSpeed is told there is: enough to flatten weights on the device."""


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no(*_: Any, **__: Any) -> bool:
    return False


def _accelerator(streams: Any) -> Any:
    """DeepSpeed's device: asynchronous as CUDA, with tensors on meta."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class MetaAccelerator(CPU_Accelerator):  # type: ignore[misc]
        """Tensors without data, on streams that only have numbers."""

        def is_synchronized_device(self) -> bool:
            return False

        def device_name(self, device_index: Any = None) -> str:
            return "meta"

        def device(self, device_index: Any = None) -> Any:
            return torch.device("meta")

        def current_device(self) -> str:
            return "meta"

        def current_device_name(self) -> str:
            return "meta"

        def device_count(self) -> int:
            return int(os.environ["WORLD_SIZE"])

        def on_accelerator(self, tensor: Any) -> bool:
            return bool(tensor.is_meta)

        def available_memory(self, device_index: Any = None) -> int:
            return _MUCH_BYTES

        total_memory = available_memory

        def get_rss(self) -> int:
            return 0

        reset_rss = get_rss

        def communication_backend_name(self) -> str:
            return "fake"

        def create_op_builder(self, op_name: str) -> None:
            """Nothing is compiled."""

        Stream = staticmethod(streams.Stream)
        Event = staticmethod(streams.Event)
        stream = staticmethod(streams.stream)
        current_stream = staticmethod(streams.current_stream)
        default_stream = staticmethod(streams.default_stream)

    return MetaAccelerator()


class _ShapesOnly(TorchFunctionMode):
    """Leaves out of the trace what DeepSpeed itself keeps without data: the shapes of weights."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros_like and kwargs.get("device") == "meta":
            with _disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def deepspeed_on_meta(streams: Any) -> Iterator[None]:
    """Inside, DeepSpeed trains on tensors without data, as rank 0 of the process group there is.

    `streams` is what it asks in place of `torch.cuda`. Gradients never overflow, and what ranks
    would compare is alike.
    """
    require_deepspeed()
    import deepspeed.comm
    from deepspeed.accelerator import real_accelerator
    from deepspeed.runtime.zero import partitioned_param_coordinator, stage3, stage_1_and_2
    from deepspeed.utils import groups

    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(dist.get_world_size())}
    stages = stage_1_and_2, stage3
    replacements = [
        (real_accelerator, "ds_accelerator", _accelerator(streams)),
        (stage_1_and_2.DeepSpeedZeroOptimizer, "has_overflow", _no),
        (stage3.DeepSpeedZeroOptimizer_Stage3, "has_overflow", _no),
        *((module, "is_invalid_grad_norm", _no) for module in stages),
        (partitioned_param_coordinator, "assert_ints_same_as_other_ranks", _nothing),
        (torch.Tensor, "record_stream", _nothing),
        # The third stage puts its own in its place, and leaves it there.
        (torch.nn.functional, "linear", torch.nn.functional.linear),
    ]
    with _ShapesOnly(), contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, ranks))
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        try:
            yield
        finally:
            # It keeps groups of the process group that is about to end.
            groups._release_process_group_references()
            deepspeed.comm.comm.cdb = None


Enter = Callable[[int], None]
"""Told the number of the stream on which what follows is allocated; 0 is the default one."""


class _Event:
    """An event of a device without time: it has always happened."""

    def record(self, stream: Any = None) -> _Event:
        """Itself, as `torch.cuda.Event.record` does not say but FSDP2 expects."""
        return self

    def wait(self, stream: Any = None) -> None:
        """Nothing is on its way."""

    def synchronize(self) -> None:
        """Nothing is on its way."""

    def query(self) -> bool:
        """Always true: the event has happened."""
        return True


class _Stream:
    """A stream of which only the number counts."""

    def __init__(self, number: int) -> None:
        self.number = number

    def record_event(self) -> _Event:
        """An event that has happened."""
        return _Event()

    def synchronize(self) -> None:
        """Nothing is on its way."""

    def wait_event(self, event: Any) -> None:
        """Nothing is on its way."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is on its way."""


class _Streams:
    """FSDP2's view of `torch.cuda` in a trace; `enter` hears where allocations go."""

    def __init__(self, enter: Enter) -> None:
        self._enter = enter
        self._current = _Stream(0)
        self._count = 0

    Event = _Event

    def Stream(self, priority: int = 0) -> _Stream:  # noqa: N802 - the name in torch.cuda
        """Another stream."""
        self._count += 1
        return _Stream(self._count)

    def current_stream(self) -> _Stream:
        """The stream on which operators run now."""
        return self._current

    default_stream = current_stream

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        """Inside, operators run on `stream`."""
        before, self._current = self._current, stream
        self._enter(stream.number)
        try:
            yield
        finally:
            self._current = before
            self._enter(before.number)


@contextlib.contextmanager
def fake_ranks(parallelism: Parallelism, enter: Enter) -> Iterator[None]:
    """Inside, this process is rank 0 of several, and collectives return at once; nothing is sent.

    `enter` is called with the number of each stream that FSDP2 or DeepSpeed turns to.
    PyTorch's own stand-in for tests without a network (`FakeStore`, the backend "fake"). Raises
    `UnavailableError` where the process is a rank of something else.
    """
    ranks = parallelism.ranks
    if ranks == 1:
        yield
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UnavailableError(
            "a training on several GPUs cannot be predicted in a process that takes part in one"
        )
    # Builds no socket, unlike every other store.
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    streams = _Streams(enter)
    on_meta = deepspeed_on_meta if parallelism.zero_stage else _sharding_on_meta
    try:
        with on_meta(streams):
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _sharding_on_meta(streams: _Streams) -> Iterator[None]:
    """FSDP2 with its buffers on tensors without data, and with streams that do nothing."""
    import torch
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_init,
        _fsdp_param_group,
        _fsdp_state,
        _fully_shard,
    )

    meta = torch.device("meta")
    with contextlib.ExitStack() as stack:
        for module in (_fsdp_init, _fully_shard):
            patch = mock.patch.object(module, "_get_device_from_mesh", return_value=meta)
            stack.enter_context(patch)
        for module in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
            patch = mock.patch.object(module, "_get_device_handle", return_value=streams)
            stack.enter_context(patch)
        group = _fsdp_param_group.FSDPParamGroup
        stack.enter_context(mock.patch.object(group, "_validate_no_meta_params"))
        # Asked for where a gathered layer was not used; it would look for a device.
        stack.enter_context(
            mock.patch.object(torch.accelerator, "current_stream", streams.current_stream)
        )
        yield
