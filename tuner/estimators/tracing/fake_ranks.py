"""A process group for traces: as many ranks as asked for, of which only this one exists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
        yield
    finally:
        dist.destroy_process_group()
