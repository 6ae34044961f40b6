"""The story of a traced training step: blocks of memory that come and go, and operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tuner.core.kinds import MemoryCategory, Phase

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Block:
    """One storage: its size in bytes, when it lived and what it was for."""

    size_bytes: int
    born_phase: Phase
    born_event: int
    died_event: int = -1
    category: MemoryCategory | None = None
    is_logits: bool = False
    paged: bool = False
    """Managed memory of a paged optimizer: no torch counter sees it."""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    stream: int = 0
    """The stream that it was allocated on; what one has freed, another does not get."""
    number: int = -1
    """Its size among those of a structure (`tuner.cost.sized`)."""


MASK = " with mask"
"""Suffix of the name of fused attention with a dense mask."""


class Work(NamedTuple):
    """The work of one operator. `kind` is its class of kernel, `dtype` its first input's.

    `shape` is (batch, m, n, k) of a matrix product; of fused attention (batch x heads, queries,
    keys, head_dim); and None for everything else.
    """

    name: str
    kind: str
    flops: int
    tensor_bytes: tuple[int, ...]
    """Bytes read or written, by tensor."""
    dtype: str
    shape: tuple[int, int, int, int] | None
    workspace_bytes: tuple[int, ...]

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written in all."""
        return sum(self.tensor_bytes)


class Op(NamedTuple):
    """One execution of `Timeline.works[work]` in the phase `Timeline.marks[mark]`."""

    work: int
    mark: int
    recompute: bool


class Mark(NamedTuple):
    """A phase begins at `event`, in micro-step `micro_step` of optimizer step `step`."""

    event: int
    phase: Phase
    step: int
    micro_step: int


@dataclass(slots=True)
class Timeline:
    """The whole story of a trace; `events` holds (block index, +1 allocation or -1 free)."""

    blocks: list[Block] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=lambda: [Mark(0, Phase.LOAD, 0, 0)])
    works: list[Work] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    collectives: list[tuple[str, int, int]] = field(default_factory=list)
    """Exchanges between ranks: the operator, the bytes of its largest tensor, and the mark."""
