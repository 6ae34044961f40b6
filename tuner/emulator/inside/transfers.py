"""Values that cross between host and device.

The stand-in runtime copies small tensors and drops large ones without reading them, so that weights
cost no time and no memory. This module also copies large tensors of integers that decide shapes,
and makes floats that reach the host finite.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import empty

from tuner.emulator.inside.notes import (
    FLOATS,
    LIMITS,
    SMALL,
    STRIDED,
    Note,
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
        if out.dtype not in FLOATS:
            forget_note(out)
            if origin is not None:
                self._unknowns.read("copy to the host", origin)
                note_origin(out, origin)
        else:
            self._count_floats(source, note)
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
            self._unknowns.read("copy of unknown integers to the host")
        if out.nbytes <= FRESH_BYTES:
            out.zero_()

    def _count_floats(self, source: torch.Tensor, note: Note | None) -> None:
        """Count a read by the host of floats that were not computed."""
        is_uniform = note is not None and constant(source, note) is not None
        if origin_of(source) is not None or not (is_uniform or is_known(source)):
            self._unknowns.floats_read += 1

    def _item(self, source: torch.Tensor, value: Any) -> Any:
        """The result of `source.item()`, where `value` is the number read from memory."""
        note = noted(source)
        one = None if note is None else constant(source, note)
        if one is not None:
            value = one.item()
        if isinstance(value, float):
            self._count_floats(source, note)
            if one is None and not is_known(source):
                return self._made_up.number()
            return value if math.isfinite(value) else self._made_up.number()
        if one is None and source.dtype in LIMITS and not is_known(source):
            self._unknowns.read("item of unknown integers")
            return False if isinstance(value, bool) else 0
        if note is not None and note.origin is not None:
            self._unknowns.read("item", note.origin)
        return value


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
