"""Step time of published runs, with nothing learned from the program or the GPU of a row.

Rates of kernels come from sources of their own, with two exceptions. What a dense mask costs was
learned from a program (`MASKED`), and is held out here too. The share of the memory's rate that
elementwise kernels reach was chosen on the rows of 25 GPU types, none of which decides it alone.
Intervals come from rows, and are made again without those of the row's program, or of its GPU.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.accuracy.coverage import STEP, Held, held_rows, interval_of, program_prior
from benchmarks.accuracy.memory_intervals import doubts_of
from benchmarks.accuracy.report import Comparison, rank_correlation
from tuner.cost.calibrate import PROGRAM_PRIOR, doubted_step, prior_of
from tuner.cost.calibrate import STEP as STEP_QUANTITY
from tuner.cost.interval import Calibration, Interval, in_quadrature
from tuner.searches.front import PAIR_ERROR

TRIALS, DRAWS = 5, 20
"""Rows of a program and GPU that correct the others, and how many sets of them are drawn."""

Judge = Callable[[Comparison], tuple[Interval, float]]
"""The interval and the measured seconds of a comparison."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one program on one GPU, with what was predicted and measured of them."""

    name: str
    intervals: tuple[Interval, ...]
    measured: tuple[float, ...]

    @property
    def errors(self) -> list[float]:
        """Predicted over measured, minus 1, row by row."""
        return [i.median / m - 1 for i, m in zip(self.intervals, self.measured, strict=True)]

    @property
    def inside(self) -> list[bool]:
        """Whether the interval contains the measured value, row by row."""
        return [i.low <= m <= i.high for i, m in zip(self.intervals, self.measured, strict=True)]


def timed_rows(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The rows that are judged: a step was measured, of sequences whose length is known."""
    return [c for c in comparisons if c.case.measured.step_s and c.case.grade != "C"]


def text(timed: Sequence[Comparison], ways: Mapping[str, Judge]) -> str:
    """The tables of all ways, as Markdown."""
    rows = held_rows(timed)[STEP]
    parts = [_table(way, [*groups(timed, judge)]) for way, judge in ways.items()]
    return "\n".join([*parts, _corrected(rows), _pairs(rows)])


def judges(timed: Sequence[Comparison]) -> dict[str, Judge]:
    """The judge of each way: with the shipped prior, or the prior of rows that are left."""
    rows = dict(zip(map(id, timed), held_rows(timed)[STEP], strict=True))

    def without(value: Callable[[Held], str]) -> Judge:
        known = {
            left_out: Calibration.fit(
                (), program_prior([r for r in rows.values() if value(r) != left_out])
            )
            for left_out in {value(row) for row in rows.values()}
        }
        return lambda c: _interval(c, known[value(rows[id(c)])], held_out=True)

    shipped = Calibration.fit((), PROGRAM_PRIOR)
    return {
        "as shipped": lambda c: _interval(c, shipped, held_out=False),
        "leave one program out": without(lambda row: row.program),
        "leave one GPU out": without(lambda row: row.gpu),
    }


def _interval(
    comparison: Comparison, calibration: Calibration, *, held_out: bool
) -> tuple[Interval, float]:
    predicted = comparison.predicted
    step_s = predicted.held_out_step_s if held_out else predicted.step_s
    unknown = predicted.held_out_unknown if held_out else predicted.unknown
    unknown = in_quadrature(unknown, doubted_step(doubts_of(comparison.case)))
    measured = comparison.case.measured.step_s
    assert measured is not None
    return interval_of(calibration, step_s, unknown), measured


def groups(timed: Sequence[Comparison], judge: Judge) -> Iterator[Group]:
    """The rows of each program and GPU, as this judge sees them."""
    names = dict.fromkeys((c.case.group, c.case.gpu) for c in timed)
    for program, gpu in names:
        judged = [judge(c) for c in timed if (c.case.group, c.case.gpu) == (program, gpu)]
        intervals, measured = zip(*judged, strict=True)
        yield Group(f"{program} | {gpu}", intervals, measured)


def _table(way: str, members: Sequence[Group]) -> str:
    plain = [group for group in members if "fused" not in group.name]
    sets = {"all": members, "plain programs": plain, "fused programs": _others(members, plain)}
    lines = [
        f"\n**Step time, {way}**\n",
        "| program | GPU | rows | mean absolute error | median error | inside 90 % | rank |",
        "|---|---|---:|---:|---:|---:|---:|",
        *(f"| {group.name} | {_cells([group])} |" for group in members),
        *(f"| {name} | | {_cells(some)} |" for name, some in sets.items() if some),
    ]
    worst = max((statistics.median(group.errors) for group in members), key=abs)
    lines.append(f"\nWorst median of a program and GPU: {worst:+.1%}.")
    return "\n".join(lines)


def _others(groups: Sequence[Group], some: Sequence[Group]) -> list[Group]:
    return [group for group in groups if group not in some]


def _cells(groups: Sequence[Group]) -> str:
    errors = [error for group in groups for error in group.errors]
    inside = [one for group in groups for one in group.inside]
    rank = None
    if len(groups) == 1:
        medians = [interval.median for interval in groups[0].intervals]
        rank = rank_correlation(medians, groups[0].measured)
    return (
        f"{len(errors)} | {statistics.fmean(map(abs, errors)):.1%} | "
        f"{statistics.median(errors):+.1%} | {statistics.fmean(inside):.0%} | "
        f"{'' if rank is None else f'{rank:.3f}'}"
    )


def _corrected(rows: Sequence[Held]) -> str:
    """What five trials of a program on a GPU make of the errors of its other rows.

    With trials of one machine, with those of several mixed, and of one model alone, as the trials
    of a space are.
    """
    lines = [
        f"\n**Step time, corrected by {TRIALS} trials of the program on the GPU "
        f"({DRAWS} draws of them)**\n",
        "| program | GPU | rows | mean absolute error before | after | inside 90 % |",
        "|---|---|---:|---:|---:|---:|",
    ]
    scopes: dict[str, Callable[[Held], tuple[str, ...]]] = {
        "all": lambda row: (row.program, row.gpu, row.machine),
        "all, machines mixed": lambda row: (row.program, row.gpu, ""),
        "all, of one model": lambda row: (
            row.program,
            row.gpu,
            " ".join(filter(None, (row.machine, row.configuration[0]))),
        ),
    }
    for title, scope in scopes.items():
        groups: dict[tuple[str, ...], list[Held]] = {}
        for row in rows:
            groups.setdefault(scope(row), []).append(row)
        judged = {key: found for key in groups if (found := [*_draws(groups[key])])}
        for (program, gpu, what), found in judged.items():
            if what or title == "all":
                named = f"{program}, {what}" if what else program
                number = len(groups[program, gpu, what])
                lines.append(f"| {named} | {gpu} | {number} | {_corrected_cells(found)} |")
        together = [one for found in judged.values() for one in found]
        number = sum(len(groups[key]) for key in judged)
        lines.append(f"| {title} | | {number} | {_corrected_cells(together)} |")
    return "\n".join(lines)


def _draws(members: Sequence[Held]) -> Iterator[tuple[float, float, bool]]:
    """For each draw and each row that is no repetition of a drawn one: errors, and if inside."""
    prior = prior_of(STEP_QUANTITY, has_profile=False)
    configurations = [*dict.fromkeys(row.configuration for row in members)]
    if len(configurations) <= TRIALS:
        return
    chance = random.Random(0)  # noqa: S311 - no secret
    for _ in range(DRAWS):
        drawn = set(chance.sample(configurations, TRIALS))
        tried = [row.observation for row in members if row.configuration in drawn]
        calibration = Calibration.fit(tried, prior)
        for row in members:
            if row.configuration not in drawn:
                seen = row.observation
                assert seen.measured is not None
                found = calibration.correct(seen.predicted, units=seen.units)
                yield (
                    abs(seen.predicted / seen.measured - 1),
                    abs(found.median / seen.measured - 1),
                    found.low <= seen.measured <= found.high,
                )


def _corrected_cells(judged: Sequence[tuple[float, float, bool]]) -> str:
    before, after, inside = zip(*judged, strict=True)
    means = (statistics.fmean(before), statistics.fmean(after))
    return f"{means[0]:.1%} | {means[1]:.1%} | {statistics.fmean(inside):.0%}"


def _pairs(rows: Sequence[Held]) -> str:
    """By how much errors differ between two configurations of one model, program and machine.

    And, with nothing of a program known, by how much those of other programs do. Rows that wait
    for their host, or of which a kernel's rate is not known, are left out.
    """
    known = [row for row in rows if row.unknown[1] < 1.1]
    programs = dict.fromkeys(row.program for row in known)
    lines = [
        "\n**Two configurations of one model, program, GPU and machine**\n",
        "| program | pairs | errors differ by, median | 90 % | 90 % of other programs' "
        "| closer than that: in wrong order | others |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for program in programs:
        own = _differences([row for row in known if row.program == program])
        limit = _part_of(_differences([row for row in known if row.program != program]), 0.9)
        lines.append(f"| {program} | {_pair_cells(own, limit)} |")
    everything = _differences(known)
    return "\n".join([*lines, f"| all | {_pair_cells(everything, PAIR_ERROR)} |"])


def _differences(rows: Sequence[Held]) -> list[tuple[float, float, bool]]:
    """Of each pair: how the errors differ, how far predicted rates are apart, if in wrong order.

    The first two as logarithms; rates are samples/s.
    """
    found = []
    for one, other in itertools.combinations(rows, 2):
        same = (one.group, one.configuration[0]) == (other.group, other.configuration[0])
        if same and one.configuration != other.configuration:
            seen = [row.observation for row in (one, other)]
            work = math.log(other.samples / one.samples)
            predicted = math.log(seen[0].predicted / seen[1].predicted) + work
            measured = math.log((seen[0].measured or 0.0) / (seen[1].measured or 1.0)) + work
            found.append((abs(measured - predicted), abs(predicted), measured * predicted < 0))
    return found


def _part_of(pairs: Sequence[tuple[float, float, bool]], share: float) -> float:
    return sorted(pair[0] for pair in pairs)[math.ceil(share * len(pairs)) - 1]


def _pair_cells(pairs: Sequence[tuple[float, float, bool]], limit: float) -> str:
    if not pairs:
        return f"0 | | | {limit:.1%} | |"
    close = [wrong for _, apart, wrong in pairs if apart < limit]
    far = [wrong for _, apart, wrong in pairs if apart >= limit]
    shares = (f"{sum(wrong)} of {len(wrong)}" for wrong in (close, far))
    spread = " | ".join(f"{_part_of(pairs, share):.1%}" for share in (0.5, 0.9))
    return f"{len(pairs)} | {spread} | {limit:.1%} | {' | '.join(shares)}"
