"""Values that cross between host and device.

The stand-in runtime copies small tensors and drops large ones without reading them, so that weights
cost no time and no memory. This module also copies large tensors of integers that decide shapes,
and makes floats that reach the host finite.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import empty

from tuner.emulator.inside.lines import BRANCH
from tuner.emulator.inside.lines import UNKNOWN as UNREAD
from tuner.emulator.inside.notes import (
    ASSUMED,
    FLOATS,
    LIMITS,
    MADE_UP,
    SMALL,
    STRIDED,
    alias,
    constant,
    covers_storage,
    forget_note,
    is_known,
    note_known,
    note_origin,
    note_unknown,
    noted,
    origin_of,
    parts_of,
)
from tuner.emulator.inside.operators import Operator
from tuner.emulator.inside.settling import Handler, Settling
from tuner.emulator.inside.uses import Loops, use_in

# The stand-in runtime copies up to this size from host to device (KEPT in device/cudart.c).
KEPT_BYTES = 1 << 20
# Floats from the host are known up to this many; larger tensors are weights, often without values.
MOST_FLOATS = 65_536
# Large tensors of these types are token ids and masks, not weights.
_CARRIED = frozenset({torch.int64, torch.bool})
# Unknown integers of these types are counted when the host reads them; others are weights.
_COUNTED = frozenset({torch.int64, torch.int32, torch.bool})
# New host memory above this size comes from the system as zeros.
FRESH_BYTES = 32 << 20


class Transfers:
    """Copies between host and device, and single values read by the host."""

    def __init__(self, settling: Settling) -> None:
        self._settling = settling
        self._made_up = settling.made_up
        self._unknowns = settling.unknowns
        self.loops = Loops()
        self.refuse: Callable[[str, FrameType | None], Any] = lambda name, frame: None
        """Ends the emulation, with the name of what cannot be emulated."""

    def to_copy(self, operator: Operator) -> Handler:
        """The handler of `_to_copy`, which implements `to`, `cuda` and `cpu`."""
        returned = self._settling.returned(operator)

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            source = args[0]
            if source.is_cuda:
                out = returned(func, args, kwargs)
                if out.is_cpu:
                    self._to_host(out, source, fresh=True)
                return out
            target = kwargs.get("device")
            if target is None or target.type != "cuda":
                return func(*args, **kwargs)
            args = (_stand_in(source, kwargs), *args[1:])
            out = func(*args, **kwargs)
            self._to_device(out, source)
            return out

        return call

    def copy(self, operator: Operator) -> Handler:
        """The handler of `copy_`."""
        written = self._settling.written(operator)

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            target, source = args[:2]
            if target.layout is not STRIDED or source.layout is not STRIDED:
                return written(func, args, kwargs)
            if target.is_cuda:
                if source.is_cuda:
                    return written(func, args, kwargs)
                out = func(*args, **kwargs)
                if source.is_cpu:
                    self._to_device(target, source.expand(target.shape))
                return out
            out = func(*args, **kwargs)
            if source.is_cuda and target.is_cpu:
                self._to_host(target, source.expand(target.shape), fresh=False)
            return out

        return call

    def number(self, operator: Operator) -> Handler:
        """The handler of `_local_scalar_dense`, which implements `item`."""

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = func(*args, **kwargs)
            return self._item(args[0], value) if args[0].is_cuda else value

        return call

    def _to_device(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Settle a copy of the CPU tensor `source` to the CUDA tensor `out`."""
        if out.layout is not STRIDED:
            for part, other in zip(parts_of(out), parts_of(source), strict=True):
                self._to_device(part, other)
            return
        if out.dtype in FLOATS:
            if covers_storage(out):
                forget_note(out)
            if out.numel() <= SMALL:
                alias(out).copy_(source)
            elif out.numel() <= MOST_FLOATS and covers_storage(out):
                alias(out).copy_(source)
                note_known(out)
            else:
                forget_note(out)
            return
        limit = LIMITS.get(out.dtype, 0)
        if out.numel() <= limit and (out.dtype in _CARRIED or out.nbytes <= KEPT_BYTES):
            alias(out).copy_(source)
            if noted(out) is not None and covers_storage(out):
                forget_note(out)
            note_origin(out, origin_of(source))
        elif out.dtype in LIMITS:
            note_unknown(out)

    def _to_host(self, out: torch.Tensor, source: torch.Tensor, *, fresh: bool) -> None:
        """Settle a copy of the CUDA tensor `source` to the CPU tensor `out`; `fresh`: a new one."""
        if out.layout is not STRIDED:
            for part, other in zip(parts_of(out), parts_of(source), strict=True):
                self._to_host(part, other, fresh=fresh)
            return
        note = noted(source)
        one = None if note is None else constant(source, note)
        origin = None if note is None else note.origin
        if out.dtype in FLOATS:
            if one is None and not is_known(source):
                origin = MADE_UP
        else:
            forget_note(out)
            note_origin(out, origin)
        self._read("copy to the host", origin, is_float=out.dtype in FLOATS)
        if one is not None:
            if out.nbytes <= FRESH_BYTES or one.item():
                out.fill_(one.item())
        elif is_known(source):
            out.copy_(alias(source))
            if out.dtype in FLOATS:
                _make_finite(out)
        else:
            self._unknown_to_host(out, source, fresh=fresh)

    def _unknown_to_host(self, out: torch.Tensor, source: torch.Tensor, *, fresh: bool) -> None:
        if out.dtype in FLOATS:
            if out.nbytes <= (FRESH_BYTES if fresh else KEPT_BYTES):
                self._made_up.fill_host(out)
            return
        if source.dtype in _COUNTED:
            self._read("copy of unknown integers to the host", UNREAD, is_float=False)
        if out.nbytes <= FRESH_BYTES:
            out.zero_()

    def _item(self, source: torch.Tensor, value: Any) -> Any:
        """The result of `source.item()`, where `value` is the number read from memory."""
        note = noted(source)
        one = None if note is None else constant(source, note)
        if one is not None:
            value = one.item()
        origin = None if note is None else note.origin
        if isinstance(value, float):
            if (one is None and not is_known(source)) or not math.isfinite(value):
                value, origin = self._made_up.number(), MADE_UP
        elif one is None and source.dtype in LIMITS and not is_known(source):
            value, origin = False if isinstance(value, bool) else 0, UNREAD
        reads = self._read("item", origin, is_float=isinstance(value, float))
        return self.loops.other(value, reads) if reads >= Loops.ESCAPE else value

    def _read(self, operator: str, origin: str | None, *, is_float: bool) -> int:
        """Note a value that the host reads; return the reads of the running loop, or 0."""
        self._unknowns.floats_read += is_float and origin is not None
        if origin is None or (origin == ASSUMED and is_float):
            return 0
        frame = sys._getframe(1)
        use = use_in(frame)
        if use.kind or not is_float:
            self._unknowns.used(operator, origin, use.kind, grows=use.grows)
        reads = self.loops.count(use) if use.kind == BRANCH else 0
        if reads > Loops.END:
            self.refuse("a loop that waits for a made-up value", frame)
        return reads


def _make_finite(tensor: torch.Tensor) -> None:
    """Replaces the non-finite floats in a CPU tensor."""
    if tensor.numel() and not math.isfinite(float(tensor.sum(dtype=torch.float32))):
        torch.nan_to_num_(tensor, nan=1.0, posinf=1.0, neginf=-1.0)


def _stand_in(source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """The tensor to copy to the device for a CPU tensor, so that weights are not converted.

    A blocking copy converts on the CPU. Untouched memory of the new type costs nothing.
    """
    dtype = kwargs.get("dtype") or source.dtype
    if (
        dtype == source.dtype
        or kwargs.get("non_blocking")
        or dtype not in FLOATS
        or source.numel() * dtype.itemsize <= KEPT_BYTES
        or not source.is_cpu
        or source.layout is not STRIDED
        or not source.is_contiguous()
    ):
        return source
    return empty(source.shape, dtype=dtype)
