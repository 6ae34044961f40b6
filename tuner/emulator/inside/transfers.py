"""Values that cross between host and device.

The stand-in runtime copies what is small, and drops what is large without reading it: weights cost no
time and no memory. Here: large integers that decide shapes do go over, and what arrives at the host is
finite.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

from tuner.emulator.inside.aliases import (
    FLOATS,
    LIMITS,
    MEDIUM,
    SMALL,
    alias,
    covers_storage,
    forget_note,
    is_known,
    note_known,
    note_unknown,
    noted,
)
from tuner.emulator.inside.made_up import MadeUp

# What the stand-in runtime copies from host to device (KEPT in device/cudart.c).
KEPT_BYTES = 1 << 20
# Large tensors of these types are token ids and masks, not weights.
_CARRIED = frozenset({torch.int64, torch.bool})
# New host memory of more than this comes from the system, as zeros.
_FRESH_BYTES = 32 << 20


class Transfers:
    """Copies between host and device, and single values read by the host."""

    def __init__(self, made_up: MadeUp, unknown: Counter[str]) -> None:
        self._made_up = made_up
        self._unknown = unknown

    def stand_in(self, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """What to copy to the device for a CPU tensor: weights are not converted on the way.

        A blocking copy converts on the CPU; memory of the new type that nobody touched costs nothing.
        """
        dtype = kwargs.get("dtype") or source.dtype
        if (
            dtype == source.dtype
            or kwargs.get("non_blocking")
            or dtype not in FLOATS
            or source.numel() * dtype.itemsize <= KEPT_BYTES
            or not source.is_cpu
            or not source.is_contiguous()
        ):
            return source
        return torch.empty(source.shape, dtype=dtype)

    def to_device(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """After a copy of the CPU tensor `source` to the CUDA tensor `out`."""
        if out.dtype in FLOATS:
            if out.numel() <= SMALL:
                alias(out).copy_(source)
            elif out.numel() <= MEDIUM and covers_storage(out):
                alias(out).copy_(source)
                note_known(out)
            return
        limit = LIMITS.get(out.dtype, 0)
        if out.numel() <= limit and (out.dtype in _CARRIED or out.nbytes <= KEPT_BYTES):
            alias(out).copy_(source)
            if noted(out) is not None and covers_storage(out):
                forget_note(out)
        elif out.dtype in LIMITS:
            note_unknown(out)

    def to_host(self, out: torch.Tensor, source: torch.Tensor, *, fresh: bool) -> None:
        """After a copy of the CUDA tensor `source` to the CPU tensor `out`, which is `fresh` memory."""
        if is_known(source):
            out.copy_(alias(source))
            if out.dtype in FLOATS:
                finite(out)
        elif out.dtype in FLOATS:
            if out.nbytes <= (_FRESH_BYTES if fresh else KEPT_BYTES):
                self._made_up.fill_host(out)
        else:
            if source.dtype not in FLOATS:
                self._unknown["copy of unknown integers to the host"] += 1
            if out.nbytes <= _FRESH_BYTES:
                out.zero_()

    def item(self, source: torch.Tensor, value: Any) -> Any:
        """The number that `source.item()` gives, `value` being what memory held."""
        if isinstance(value, float):
            if not is_known(source):
                return self._made_up.number()
            return value if math.isfinite(value) else self._made_up.number()
        if source.dtype in LIMITS and not is_known(source):
            self._unknown["item of unknown integers"] += 1
            return False if isinstance(value, bool) else 0
        return value


def finite(tensor: torch.Tensor) -> None:
    """Replaces what is not finite in a CPU tensor."""
    if tensor.numel() and not math.isfinite(float(tensor.sum(dtype=torch.float32))):
        torch.nan_to_num_(tensor, nan=1.0, posinf=1.0, neginf=-1.0)
