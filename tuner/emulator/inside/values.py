"""Computes the values that can decide shapes, which emulated kernels don't write.

The real CUDA operator always runs: its outputs and temporaries come from PyTorch's allocator, as on
a device. Then its values are computed on the CPU, on aliases of device memory, and written to its
outputs. Integers and booleans are computed, and so are few floats if their inputs are known. Other
values are made up (see made_up.py) or left alone: large tensors of floats are never computed or
touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import arange

from tuner.emulator.inside.compiled import install as install_compiled
from tuner.emulator.inside.faults import note
from tuner.emulator.inside.lines import Unknowns
from tuner.emulator.inside.made_up import MadeUp
from tuner.emulator.inside.notes import AT_MOST, FLOATS, MADE_UP, alias, is_known, note_origin
from tuner.emulator.inside.operators import EMPTY, Operator
from tuner.emulator.inside.readbacks import COUNTED, UNREADABLE, Readbacks, Reading
from tuner.emulator.inside.settling import Handler, Settling, is_wanted
from tuner.emulator.inside.transfers import Transfers

__all__ = ["Handler", "Values"]


class Values:
    """Chooses the handler for each operator's values, once per operator."""

    def __init__(self, seed: int = 0) -> None:
        made_up = MadeUp(seed)
        self._settling = Settling(made_up)
        self._readbacks = Readbacks(made_up)
        self.transfers = transfers = Transfers(self._settling)
        self._special: dict[str, Callable[[Operator], Handler]] = {
            "aten::_to_copy": transfers.to_copy,
            "aten::copy_": transfers.copy,
            "aten::_local_scalar_dense": transfers.number,
            "aten::equal": self._compared,
            "aten::allclose": self._compared,
            "aten::histc": self._histogram,
            "torchvision::nms": self._suppressed,
        }

    def install(self) -> None:
        """Give values to the outputs of compiled graphs as well."""
        install_compiled(self._settling)

    @property
    def unknowns(self) -> Unknowns:
        """The values that could not be computed and may matter for shapes."""
        return self._settling.unknowns

    @property
    def failures(self) -> dict[str, str]:
        """The reason why the CPU could not compute an operator, by operator; for debugging."""
        return self._settling.failures

    def handler(self, func: Any) -> Handler | None:
        """The function to call, with (func, args, kwargs), in place of `func`, or None."""
        if not isinstance(func, torch._ops.OpOverload):
            return _call  # takes functions, whose operators come back one by one
        operator = Operator(func)
        return None if operator.passes else self._handler(operator)

    def _handler(self, operator: Operator) -> Handler:
        settling = self._settling
        if operator.full_name in self._special:
            handler = self._special[operator.full_name](operator)
        elif operator.is_foreach:
            handler = settling.foreach(operator)
        elif operator.name in EMPTY:
            handler = settling.empty
        elif operator.leaves:
            handler = settling.left
        elif operator.is_constant and not operator.mutates:
            handler = settling.constant
        elif operator.full_name in COUNTED:
            handler = self._counted(operator)
        elif operator.mutates:
            handler = settling.written(operator)
        else:
            handler = settling.returned(operator)
        return handler

    def _counted(self, operator: Operator) -> Handler:
        """The handler of operators that read the size of their output from the device."""

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not args[0].is_cuda:
                return func(*args, **kwargs)
            fault = None
            try:
                counts, origin = self._readbacks.counted(operator, args, kwargs)
            except Exception as error:  # noqa: BLE001 - a read of arbitrary memory would be worse
                counts, origin, fault = list(UNREADABLE), MADE_UP, error
            if origin is not None:
                self.unknowns.decided(operator.name, origin)
            try:
                out = self._readbacks.call(func, args, kwargs, counts)
                if fault is not None:
                    note(fault, f"what {operator.full_name} reads back")
            finally:
                del fault
            if operator.mutates:
                if is_wanted(out):
                    self._settling.settle_written(operator, args, kwargs)
                return out
            return self._settling.settle(operator, args, kwargs, out)

        return call

    def _compared(self, operator: Operator) -> Handler:
        """The handler of operators that return a Python boolean."""

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            one, other = args[:2]
            if not one.is_cuda or one.shape != other.shape:
                return func(*args, **kwargs)
            same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
            reading = Reading(None)
            values = reading.tensor(one), reading.tensor(other)
            if not reading.unknown:
                same = operator.func(*values, *args[2:], **kwargs)
            elif not same:
                self.unknowns.floats_read += 1
            self._readbacks.call(func, args, kwargs, [(int(same), 1)])
            return same

        return call

    def _histogram(self, operator: Operator) -> Handler:
        """The handler of `histc`: the CPU has no histogram of integers, so it counts floats."""
        returned = self._settling.returned(operator)

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            source = args[0]
            if not source.is_cuda or source.dtype in FLOATS or not is_known(source):
                return returned(func, args, kwargs)
            out = func(*args, **kwargs)
            counts = operator.func(alias(source).double(), *args[1:], **kwargs)
            alias(out).copy_(counts)
            return out

        return call

    def _suppressed(self, operator: Operator) -> Handler:
        """The handler of non-maximum suppression, which keeps all boxes if they are unknown."""

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            boxes, scores, threshold = args
            if not boxes.is_cuda or not len(boxes):
                return func(*args, **kwargs)
            reading = Reading(None)
            values = reading.tensor(boxes), reading.tensor(scores)
            origin = AT_MOST if reading.unknown else reading.origin and AT_MOST
            if origin is None:
                kept = func(*(one.float() for one in values), threshold)
            else:
                kept = arange(len(boxes))
                self.unknowns.decided(operator.name, origin)
            out = self._readbacks.call(func, args, kwargs, [(len(kept), 4)])
            alias(out).copy_(kept)
            note_origin(out, origin)
            return out

        return call


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)
