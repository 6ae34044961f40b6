"""Values where they decide shapes: what each operator leaves in device memory that launches do not.

The real CUDA operator always runs: its outputs and temporaries come from PyTorch's allocator, as on
a device. Then its values are computed on the CPU, on aliases of device memory, and written where it
would have written them: integers and booleans for real, few floats for real where their inputs are
known. The rest is made up (see made_up.py) or left alone: many floats are never computed and never
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
from tuner.emulator.inside.reading import COUNTED, UNREADABLE, Readbacks, Reading
from tuner.emulator.inside.settling import Handler, Settling, is_wanted
from tuner.emulator.inside.transfers import Transfers

__all__ = ["Handler", "Values"]


class Values:
    """Decides once per operator what its values need."""

    def __init__(self, seed: int = 0) -> None:
        made_up = MadeUp(seed)
        self._settling = Settling(made_up)
        self._readbacks = Readbacks(made_up)
        transfers = Transfers(self._settling)
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
        """Have what programs compile return values as well."""
        install_compiled(self._settling)

    @property
    def unknowns(self) -> Unknowns:
        """What mattered for shapes and could not be computed."""
        return self._settling.unknowns

    @property
    def failures(self) -> dict[str, str]:
        """By operator: why the CPU could not compute it, for those who debug the emulator."""
        return self._settling.failures

    def handler(self, func: Any) -> Handler | None:
        """What to call instead of `func`, with (func, args, kwargs); None: `func` itself does."""
        if not isinstance(func, torch._ops.OpOverload):
            return _call  # operators that take functions: what is in them comes back one by one
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
        """Operators that ask the device for the size of their output."""

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not args[0].is_cuda:
                return func(*args, **kwargs)
            fault = None
            try:
                counts, origin = self._readbacks.counted(operator, args, kwargs)
            except Exception as error:  # noqa: BLE001 - memory must not answer in our place
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
        """Operators whose answer is a boolean of Python."""

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            one, other = args[:2]
            if not one.is_cuda or one.shape != other.shape:
                return func(*args, **kwargs)
            same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
            reading = Reading(None)
            values = reading.tensor(one), reading.tensor(other)
            if not reading.unknown:
                same = operator.func(*values, *args[2:], **kwargs)
            self._readbacks.call(func, args, kwargs, [(int(same), 1)])
            return same

        return call

    def _histogram(self, operator: Operator) -> Handler:
        """The CPU has no histogram of integers: it counts them as floats."""
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
        """Non-maximum suppression: of boxes that nobody knows it keeps all, which is the most."""

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
