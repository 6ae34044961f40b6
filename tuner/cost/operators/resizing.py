"""Storages that change their size: what no operator says, and a trace must hear of all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


def following_sizes(resized: Callable[[torch.UntypedStorage], None]) -> Any:
    """A patch, for `start` and `stop`, that calls `resized` with each storage of another size.

    FSDP2 frees gathered weights that autograd still refers to by taking their storage away
    (`storage.resize_(0)`), and gives it back before the backward pass.
    """
    resize = torch.UntypedStorage.resize_

    def followed(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        resized(storage)
        return result

    return mock.patch.object(torch.UntypedStorage, "resize_", followed)
