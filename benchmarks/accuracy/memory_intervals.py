"""`python -m benchmarks.accuracy.memory_intervals`: learns how far device memory may be off.

Prints the constants of `MemoryErrors` and `Doubt`, to paste, and how many rows their intervals
hold: as shipped, and learned again without a row's program, or its GPU. With `--step` it prints
the constants of `PROGRAM_PRIOR` in place of them.

A part's shares are the smallest with which 91 % of the rows are inside (`INSIDE`), with as many
misses above as below. Rows without a doubt teach the gap; those with a doubt teach what it adds, so
that all of them are inside, because they are of one or two programs.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.accuracy.coverage import STEP, held_rows, program_prior
from benchmarks.accuracy.harnesses import Case, express
from benchmarks.accuracy.predictions import predict_all
from benchmarks.accuracy.report import Comparison
from benchmarks.accuracy.rows import read_rows
from benchmarks.accuracy.traces import GPUS
from tuner.core.records import Doubt, Memory
from tuner.cost.interval import MEMORY_ERRORS, Ends, MemoryErrors, Share
from tuner.space.gpus import get_gpu

PLAIN, OLD = "plain", "BERT"
"""The name of rows without a doubt, and the beginning of groups with code of 2019 to 2022."""


INSIDE = 0.91
"""Share of the rows learned from that are inside. With 90 %, of the rows of a program that was left
out 87 % are; with 91 %, 91 % are."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A run whose reserved or device memory was measured, in bytes."""

    program: str
    gpu: str
    memory: Memory
    limit_bytes: int
    is_device: bool
    measured: float
    doubts: tuple[Doubt, ...]

    @property
    def predicted(self) -> float:
        """The size that was measured, as predicted."""
        memory = self.memory
        return float(memory.device_bytes if self.is_device else memory.peak_reserved_bytes)

    @property
    def kind(self) -> str:
        """The doubts in words."""
        return ", ".join(self.doubts) or PLAIN

    def ends(self, errors: MemoryErrors) -> Ends:
        """The interval of what was measured."""
        found = errors.ends(self.memory, limit_bytes=self.limit_bytes, doubts=self.doubts)
        return found[0 if self.is_device else 1]

    def miss(self, errors: MemoryErrors) -> int:
        """-1 if measured below the interval, 1 above it, 0 inside."""
        low, high = self.ends(errors)
        return (self.measured > high) - (self.measured < low)

    def width(self, errors: MemoryErrors) -> float:
        """Half the width of the interval, over the prediction."""
        low, high = self.ends(errors)
        return (high - low) / 2 / self.predicted


def memory_rows(comparisons: Iterable[Comparison]) -> list[MemoryRow]:
    """The rows that measured device or reserved memory at known lengths."""
    return [
        _row(one.case, one)
        for one in comparisons
        if one.case.grade != "C" and (one.case.measured.device or one.case.measured.reserved)
    ]


def _row(case: Case, one: Comparison) -> MemoryRow:
    measured, found = case.measured, one.predicted
    return MemoryRow(
        program=case.group,
        gpu=case.gpu,
        memory=Memory(
            peak_allocated_bytes=round(found.allocated),
            peak_reserved_bytes=round(found.reserved),
            device_bytes=round(found.device),
            loaded_bytes=round(found.loaded),
            phase_peak_bytes={},
            peak_phase=found.peak_phase,
            breakdown={},
        ),
        limit_bytes=get_gpu(case.gpu, extra=GPUS).memory_bytes,
        is_device=measured.device is not None,
        measured=measured.device or measured.reserved or 0.0,
        doubts=doubts_of(case),
    )


def doubts_of(case: Case) -> tuple[Doubt, ...]:
    """The doubts that are known before anything is measured."""
    if case.group.startswith(OLD):
        return (Doubt.OLD_RELEASES,)
    if "fused" in case.group:
        return (Doubt.KERNELS,)
    return (Doubt.RELEASES,) if case.grade == "B" else ()


def learned(rows: Sequence[MemoryRow], start: MemoryErrors = MEMORY_ERRORS) -> MemoryErrors:
    """The errors that these rows teach; a doubt that none of them has stays as in `start`."""
    plain = [row for row in rows if not row.doubts]
    below, above = _smallest(plain, lambda low, high: replace(start, gap_below=low, gap_above=high))
    errors = replace(start, gap_below=below, gap_above=above)
    for doubt in LEARNED:
        having = [row for row in rows if row.doubts == (doubt,)]
        if having:
            errors = _with_doubt(errors, doubt, *_smallest(having, _adding(errors, doubt), 1.0))
    return errors


LEARNED = (Doubt.KERNELS, Doubt.OLD_RELEASES)
"""Doubts that rows teach; the others have sources of their own."""


def _adding(errors: MemoryErrors, doubt: Doubt) -> Callable[[float, float], MemoryErrors]:
    return lambda below, above: _with_doubt(errors, doubt, below, above)


def _with_doubt(errors: MemoryErrors, doubt: Doubt, below: float, above: float) -> MemoryErrors:
    share = Share(below, above, errors.doubts[doubt].allocated)
    return replace(errors, doubts={**errors.doubts, doubt: share})


STEPS = tuple(step / 100 for step in range(101))
"""Shares that are tried, smallest first."""


def _smallest(
    rows: Sequence[MemoryRow],
    errors_of: Callable[[float, float], MemoryErrors],
    share: float = INSIDE,
) -> tuple[float, float]:
    """The smallest shares below and above with which enough rows are inside.

    Both sides may miss as many rows; the number falls until this share is inside.
    """
    misses_below = [sum(r.miss(errors_of(step, 1.0)) < 0 for r in rows) for step in STEPS]
    misses_above = [sum(r.miss(errors_of(1.0, step)) > 0 for r in rows) for step in STEPS]
    for allowed in range(len(rows), -1, -1):
        below, above = (
            next((step for step, n in zip(STEPS, misses, strict=True) if n <= allowed), STEPS[-1])
            for misses in (misses_below, misses_above)
        )
        inside = sum(not row.miss(errors_of(below, above)) for row in rows)
        if inside >= math.ceil(share * len(rows)):
            break
    return below, above


WAYS: dict[str, Callable[[MemoryRow], str] | None] = {
    "as shipped": None,
    "a program left out": lambda row: row.program,
    "a GPU left out": lambda row: row.gpu,
}


def judged(
    rows: Sequence[MemoryRow], value: Callable[[MemoryRow], str] | None
) -> list[tuple[MemoryRow, MemoryErrors]]:
    """Each row with the errors that judge it: shipped, or learned without its program or GPU."""
    if value is None:
        return [(row, MEMORY_ERRORS) for row in rows]
    without = {
        left: learned([row for row in rows if value(row) != left], UNTAUGHT)
        for left in dict.fromkeys(map(value, rows))
    }
    return [(row, without[value(row)]) for row in rows]


UNTAUGHT = replace(
    MEMORY_ERRORS,
    doubts={
        d: Share(0.0, 0.0, s.allocated) if d in LEARNED else s
        for d, s in MEMORY_ERRORS.doubts.items()
    },
)
"""Without what rows teach of doubts."""


def cells(found: Sequence[tuple[MemoryRow, MemoryErrors]]) -> str:
    """The median of half the width, and the share of rows inside."""
    inside = statistics.fmean(not row.miss(errors) for row, errors in found)
    width = statistics.median(row.width(errors) for row, errors in found)
    return f"±{width:.1%}, {inside:.0%}"


def table(rows: Sequence[MemoryRow]) -> str:
    """Half the width and the rows inside, by kind, program and GPU, as Markdown."""
    lines = [f"| rows | number | {' | '.join(WAYS)} |", "|---|---:|---|---|---|"]
    ways = [judged(rows, value) for value in WAYS.values()]
    kinds = dict.fromkeys(row.kind for row in rows)
    sets: dict[str, Callable[[MemoryRow], bool]] = {
        f"**{kind}**": lambda row, kind=kind: row.kind == kind for kind in kinds
    }
    sets |= {
        f"{program} on {gpu}": lambda row, one=(program, gpu): (row.program, row.gpu) == one
        for program, gpu in dict.fromkeys((row.program, row.gpu) for row in rows)
    }
    for name, belongs in sets.items():
        found = [[one for one in way if belongs(one[0])] for way in ways]
        lines.append(f"| {name} | {len(found[0])} | {' | '.join(map(cells, found))} |")
    return "\n".join(lines)


def constants(errors: MemoryErrors) -> str:
    """The lines of `MemoryErrors` to paste."""
    doubts = [
        f"Doubt.{doubt.name}: Share({share.below:g}, {share.above:g}, {share.allocated:g}),"
        for doubt, share in errors.doubts.items()
        if doubt in LEARNED
    ]
    gap = [f"gap_below: float = {errors.gap_below:g}", f"gap_above: float = {errors.gap_above:g}"]
    return "\n".join(gap + doubts)


def main() -> None:
    """Predict the rows, learn from them and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", action="store_true", help="the prior of step times instead")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    cases = [case for row in read_rows() if isinstance(case := express(row), Case)]
    wanted = [case for case in cases if _is_wanted(case, step=arguments.step)]
    found = predict_all(wanted, processes=arguments.processes)
    comparisons = [Comparison(wanted[index], predicted) for index, predicted in found]
    if arguments.step:
        prior = program_prior(held_rows(comparisons)[STEP])
        print(f"PROGRAM_PRIOR: bias_scale={prior.bias_scale}, spread={prior.spread}")
        return
    rows = memory_rows(comparisons)
    print(constants(learned(rows)), table(rows), sep="\n\n")


def _is_wanted(case: Case, *, step: bool) -> bool:
    measured = case.measured
    return bool(measured.step_s if step else measured.device or measured.reserved)


if __name__ == "__main__":
    main()
