"""DeepSpeed's own engine on tensors without data: an accelerator that is no device.

Nothing of ZeRO is modelled here. DeepSpeed asks a device, streams and other ranks for what a trace
cannot say; this answers in their place.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from tuner.predict.training.sharding import require_deepspeed

_MUCH_BYTES = 1 << 50
"""Memory that DeepSpeed is told there is: enough to flatten weights on the device."""


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no(*_: Any, **__: Any) -> bool:
    return False


def _accelerator(streams: Any) -> Any:
    """What DeepSpeed takes for its device: asynchronous as CUDA, with tensors on meta."""
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
