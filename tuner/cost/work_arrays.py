"""The work of many operators at many points as arrays: what a roofline is evaluated on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuner.core.kinds import Phase
from tuner.cost.operators.timeline import Timeline, Work
from tuner.cost.polynomial import Terms

Floats = NDArray[np.float64]


class _Segment(NamedTuple):
    """One phase of one micro-step."""

    phase: Phase
    micro_step: int


SEGMENTS = tuple(
    _Segment(phase, micro_step)
    for micro_step in (0, 1)
    for phase in (Phase.FORWARD, Phase.BACKWARD)
)


@dataclass(frozen=True, slots=True, eq=False)
class Operators:
    """W distinct operators: their names, kinds and dtypes, and the polynomials of their work.

    `tensor_bytes` and `tensor_of` (T,): bytes that operators touch, tensor by tensor, and the
    operator each belongs to. `shapes`: as in `Work`, four rows an operator.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    flops: Terms
    tensor_bytes: Terms
    tensor_of: NDArray[np.int32]
    shapes: Terms
    has_shape: NDArray[np.bool_]

    def moved_bytes(self, points: Floats) -> Floats:
        """Bytes that each operator reads and writes; shape (W, points)."""
        moved = np.zeros((len(self.kinds), len(points)))
        np.add.at(moved, self.tensor_of, self.tensor_bytes.at(points))
        return moved

    def is_consistent(self) -> bool:
        """Check that the arrays belong together."""
        number, tensors = len(self.kinds), len(self.tensor_bytes.coefficients)
        return (
            len(self.names) == len(self.dtypes) == len(self.flops.coefficients) == number
            and self.tensor_of.shape == (tensors,)
            and bool((self.tensor_of >= 0).all() and (self.tensor_of < number).all())
            and len(self.shapes.coefficients) == 4 * number
            and self.has_shape.shape == (number,)
            and all(terms.is_consistent() for terms in (self.flops, self.tensor_bytes, self.shapes))
        )


@dataclass(frozen=True, slots=True, eq=False)
class WorkArrays:
    """W operators at P points: `flops` and `bytes_moved` (W, P), `shapes` (W, 4, P).

    `names`, `kinds` and `dtypes` have one entry an operator; `has_shape` tells products and fused
    attention from the rest.
    """

    names: NDArray[np.str_]
    kinds: NDArray[np.str_]
    dtypes: NDArray[np.str_]
    flops: Floats
    bytes_moved: Floats
    shapes: Floats
    has_shape: NDArray[np.bool_]

    @classmethod
    def of_works(cls, works: Iterable[Work]) -> WorkArrays:
        """The operators of one trace: one point."""
        listed = list(works)
        return cls(
            names=np.array([work.name for work in listed], dtype=np.str_),
            kinds=np.array([work.kind for work in listed], dtype=np.str_),
            dtypes=np.array([work.dtype for work in listed], dtype=np.str_),
            flops=np.array([[work.flops] for work in listed], dtype=float).reshape(-1, 1),
            bytes_moved=np.array([[w.bytes_moved] for w in listed], dtype=float).reshape(-1, 1),
            shapes=np.array([w.shape or (1, 1, 1, 1) for w in listed], dtype=float).reshape(
                -1, 4, 1
            ),
            has_shape=np.array([work.shape is not None for work in listed], dtype=bool),
        )

    @classmethod
    def of_operators(cls, operators: Operators, points: Floats) -> WorkArrays:
        """The operators of a structure at many points (P, 4)."""
        return cls(
            names=np.array(operators.names, dtype=np.str_),
            kinds=np.array(operators.kinds, dtype=np.str_),
            dtypes=np.array(operators.dtypes, dtype=np.str_),
            flops=operators.flops.at(points),
            bytes_moved=operators.moved_bytes(points),
            shapes=operators.shapes.at(points).reshape(len(operators.kinds), 4, len(points)),
            has_shape=operators.has_shape,
        )

    def joined(self, other: WorkArrays) -> WorkArrays:
        """These operators and others, at the same points."""
        fields = (field.name for field in dataclasses.fields(self))
        return WorkArrays(
            **{n: np.concatenate([getattr(self, n), getattr(other, n)]) for n in fields}
        )

    def of(self, chosen: NDArray[np.bool_]) -> WorkArrays:
        """Some of the operators, at all points."""
        fields = (field.name for field in dataclasses.fields(self))
        return WorkArrays(**{name: getattr(self, name)[chosen] for name in fields})


def executions_of(timeline: Timeline) -> NDArray[np.int64]:
    """Executions of each operator in the passes of the second step: (segments, 2, W).

    The second axis tells operators that repeat a checkpointed forward from all others.
    """
    counts = np.zeros((len(SEGMENTS), 2, len(timeline.works)), dtype=np.int64)
    for op in timeline.ops:
        mark = timeline.marks[op.mark]
        segment = _Segment(mark.phase, mark.micro_step)
        if mark.step == 1 and segment in SEGMENTS:
            counts[SEGMENTS.index(segment), int(op.recompute), op.work] += 1
    return counts


def optimizer_executions_of(timeline: Timeline) -> NDArray[np.int64]:
    """Executions of each operator in the update of the second step: (W,)."""
    counts = np.zeros(len(timeline.works), dtype=np.int64)
    for op in timeline.ops:
        mark = timeline.marks[op.mark]
        if mark.step == 1 and mark.phase is Phase.OPTIMIZER:
            counts[op.work] += 1
    return counts
