"""Gradients of whole parameters under FSDP, which no parameter has: they are reduced to shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from tuner.emulator.inside.later import when_imported

Note = Callable[[Iterable[Any]], Any]


def when_reduced(note: Note) -> None:
    """Call `note` with gradients on the device that FSDP (PyTorch 2.8 to 2.13) is to reduce."""
    fsdp = "torch.distributed.fsdp"
    when_imported(f"{fsdp}._fully_shard._fsdp_collectives", functools.partial(_watch_second, note))
    when_imported(f"{fsdp}._runtime_utils", functools.partial(_watch_first, note))


def _watch_second(note: Note, module: ModuleType) -> None:
    """FSDP2: the gradients are an argument."""
    reduce = module.foreach_reduce

    @functools.wraps(reduce)
    def foreach_reduce(parameters: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        note(gradients)
        return reduce(parameters, gradients, *args, **kwargs)

    module.foreach_reduce = foreach_reduce  # type: ignore[attr-defined]


def _watch_first(note: Note, module: ModuleType) -> None:
    """FSDP1: the flat parameter has its gradient until then."""
    reduce = module._reduce_grad

    @functools.wraps(reduce)
    def reduce_grad(state: Any, handle: Any) -> Any:
        note([getattr(handle.flat_param, "grad", None)])
        return reduce(state, handle)

    module._reduce_grad = reduce_grad  # type: ignore[attr-defined]
