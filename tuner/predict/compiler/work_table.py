"""The operators of traced models, with polynomials for their work and how often each runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tuner.cost.compiled import SEGMENTS, Segment
from tuner.cost.operators.timeline import Timeline, Work
from tuner.cost.polynomial import NotPolynomialError, Polynomial, Probe, fit
from tuner.predict.compiler.layouts import CompileError


class WorkTable:
    """The distinct operators with polynomials for their work, and how often each runs."""

    def __init__(self, probes: tuple[Probe, Probe], first: Timeline, second: Timeline) -> None:
        self._probes = probes
        self.pairs = work_pairs(first, second)
        self._base = self._counted(first, self.pairs)
        self.executions = self._base.copy()
        """Executions (S, 2, W) of the model with all layers added so far."""

    @property
    def ambiguous(self) -> bool:
        """Whether different operators do the same work at the first probe."""
        return len({one for one, _ in self.pairs}) < len(set(self.pairs))

    def add_layers(self, layers: int, first: Timeline, second: Timeline | None) -> None:
        """Count the work of so many further layers, given a model with one more.

        The second trace may be missing where nothing is ambiguous.
        """
        if second is not None:
            pairs = work_pairs(first, second)
        else:
            twins = dict(self.pairs)
            pairs = [(work, twins.get(work, work)) for work in first.works]
        self.executions += layers * (self._counted(first, pairs) - self._base)

    def _counted(self, timeline: Timeline, pairs: list[tuple[Work, Work]]) -> Any:
        numbers = {pair: number for number, pair in enumerate(self.pairs)}
        counts = np.zeros((len(SEGMENTS), 2, len(self.pairs)), dtype=np.int64)
        for op in timeline.ops:
            mark = timeline.marks[op.mark]
            segment = Segment(mark.phase, mark.micro_step)
            if segment in SEGMENTS and mark.step == 1:
                number = numbers.get(pairs[op.work])
                if number is None:
                    name = timeline.works[op.work].name
                    raise CompileError(f"a deeper model runs a new kind of {name}")
                counts[SEGMENTS.index(segment), int(op.recompute), number] += 1
        return counts

    def fit(self, first: int, second: int) -> Polynomial:
        """The polynomial of a quantity of an operator."""
        try:
            return fit((first, second), self._probes)
        except NotPolynomialError as error:
            raise CompileError(f"the work of an operator is not a polynomial: {error}") from error


def work_pairs(first: Timeline, second: Timeline) -> list[tuple[Work, Work]]:
    """Each operator of a model, as it is at the two probes."""
    if [work.name for work in first.works] != [work.name for work in second.works]:
        raise CompileError("the sequence of operators depends on batch, length or rank")
    return list(zip(first.works, second.works, strict=True))
