"""A process group for traces: as many ranks as asked for, of which only this one exists.

FSDP2 allocates on streams of its own, and PyTorch's caching allocator gives what one stream has
freed to no other: the trace notes the stream of every allocation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tuner.core.errors import UnavailableError
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.predict.tracing.fake_deepspeed import deepspeed_on_meta

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
        """Whether it has happened."""
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
    """What FSDP2 asks of `torch.cuda`, for a trace: `enter` hears where allocations go."""

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
