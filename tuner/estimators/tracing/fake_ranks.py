"""A process group for traces: as many ranks as asked for, of which only this one exists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from tuner.errors import UnavailableError


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `ranks`, and collectives return at once; nothing is sent.

    PyTorch's own stand-in for tests without a network (`FakeStore`, the backend "fake"). Raises
    `UnavailableError` where the process is a rank of something else.
    """
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
    try:
        with _sharding_on_meta():
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _sharding_on_meta() -> Iterator[None]:
    """FSDP2 with its buffers on tensors without data, and the streams of a processor: none."""
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
            patch = mock.patch.object(module, "_get_device_handle", return_value=torch.cpu)
            stack.enter_context(patch)
        group = _fsdp_param_group.FSDPParamGroup
        stack.enter_context(mock.patch.object(group, "_validate_no_meta_params"))
        yield
