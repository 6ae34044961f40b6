"""What a rule about a kernel says; the rules are in `aten_kernels` and `bnb_kernels`.

Only torch is needed for a rule: the emulator reads them inside of programs that may not have
bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class LeafKernel:
    """One kernel: class of work, FLOPs, shape as in `Work`, workspace, bytes beside in/out."""

    kind: str
    flops: int = 0
    shape: tuple[int, int, int, int] | None = None
    workspace_bytes: tuple[int, ...] = ()
    dtype: str | None = None
    has_mask: bool = False
    """Whether fused attention was given a dense mask, which makes it slower."""


LeafRule = Callable[[Any, tuple[Any, ...], Any], LeafKernel]
"""The kernel of an operator with these arguments and results."""


class Kernels(NamedTuple):
    """The two tables of one kind of device, by operator."""

    decompositions: Mapping[Any, Callable[..., Any]]
    leaves: Mapping[Any, LeafRule]
