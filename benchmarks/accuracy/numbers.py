"""The closing table: how near predictions are, as shipped and with programs or GPUs left out.

Memory has no constant that was fitted to rows, so its errors are the same in all columns; its
intervals have, and so has step time. Rows whose length is a mean (grade C) are in no line but
their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.accuracy import held_out, memory_intervals
from benchmarks.accuracy.memory_intervals import judged, memory_rows
from benchmarks.accuracy.report import Comparison
from benchmarks.accuracy.rows import Row

FUSED = "fused"
"""Part of the names of groups whose programs have fused kernels."""

ASKED = {
    "allocated, plain": "0.2 %",
    "allocated, fused kernels": "1 %",
    "allocated, mixtures of experts": "2 %",
    "device memory, plain: median, worst": "2 %, 6 %",
    "90 % interval of device memory, plain: median width, inside": "±4 %, 88 to 95 %",
    "step time: mean over program and GPU, worst group": "10 %, 25 %",
    "rows that can be expressed": "300",
}
WAYS = ("as shipped", "leave one program out", "leave one GPU out")
_HEADER = ("", "asked", "rows", *WAYS)


def text(
    comparisons: Sequence[Comparison],
    refused: Sequence[tuple[Row, str]],
    judges: Mapping[str, held_out.Judge],
) -> str:
    """The table, and which rows no constant was fitted on, as Markdown."""
    exact = [c for c in comparisons if c.case.grade != "C"]
    mean_lengths = _graded(comparisons, "C")
    plain = [c for c in exact if FUSED not in c.case.group]
    fused = [c for c in exact if FUSED in c.case.group]
    new = [c for c in exact if not c.case.fitted]
    old = [c for c in exact if c.case.fitted]
    lines = [
        _same("allocated, plain", plain, "allocated"),
        _same("allocated, fused kernels", fused, "allocated"),
        _none("allocated, mixtures of experts"),
        _same("device memory, plain: median, worst", _graded(plain, "A"), "device", "reserved"),
        _same("the same, grade B", _graded(plain, "B"), "device", "reserved"),
        *_widths(exact),
        *_step_lines(exact, old, new, mean_lengths, judges),
        _same("grade C: allocated when a step has ended", mean_lengths, "resident"),
        _expressed(comparisons, refused),
    ]
    head = ["| " + " | ".join(_HEADER) + " |", "|---|---|---:|---|---|---|"]
    return "\n".join([*head, *lines, "", _unfitted(new), ""])


def _graded(comparisons: Iterable[Comparison], grade: str) -> list[Comparison]:
    return [c for c in comparisons if c.case.grade == grade]


def _expressed(comparisons: Sequence[Comparison], refused: Sequence[tuple[Row, str]]) -> str:
    grades = ", ".join(
        f"{sum(c.case.grade == grade for c in comparisons)} {grade}" for grade in "ABC"
    )
    of = f"of {len(comparisons) + len(refused)}; {grades}"
    return _line("rows that can be expressed", len(comparisons), (of, "", ""))


def _line(name: str, rows: object, cells: Iterable[str]) -> str:
    return f"| {name} | {ASKED.get(name, '')} | {rows} | {' | '.join(cells)} |"


def _none(name: str) -> str:
    return _line(name, 0, ("not in the table", "", ""))


def _errors(comparisons: Iterable[Comparison], *quantities: str) -> list[float]:
    """The error of each row that measured one of the quantities, the first that it has."""
    found = ([c.error(quantity) for quantity in quantities] for c in comparisons)
    known = ([error for error in errors if error is not None] for errors in found)
    return [errors[0] for errors in known if errors]


def _same(name: str, comparisons: Sequence[Comparison], *quantities: str) -> str:
    errors = _errors(comparisons, *quantities)
    if not errors:
        return _none(name)
    median = statistics.median(map(abs, errors))
    return _line(name, len(errors), (f"{median:.2%}, {max(errors, key=abs):+.1%}", "same", "same"))


def _widths(exact: Sequence[Comparison]) -> Iterator[str]:
    """The intervals of device memory: of plain rows, and of rows with each doubt."""
    rows = memory_rows(exact)
    ways = [judged(rows, value) for value in memory_intervals.WAYS.values()]
    name = "90 % interval of device memory, plain: median width, inside"
    for kind in dict.fromkeys(row.kind for row in rows):
        found = [[one for one in way if one[0].kind == kind] for way in ways]
        title = name if kind == memory_intervals.PLAIN else f"of rows with {kind}"
        yield _line(title, len(found[0]), map(memory_intervals.cells, found))


def _step_lines(
    exact: Sequence[Comparison],
    old: Sequence[Comparison],
    new: Sequence[Comparison],
    mean_lengths: Sequence[Comparison],
    judges: Mapping[str, held_out.Judge],
) -> list[str]:
    sets = {
        "step time: mean over program and GPU, worst group": exact,
        "of these, programs whose rows gave the intervals": old,
        "of these, programs that no constant was fitted on": new,
        "grade C: step time at the mean length": mean_lengths,
    }
    timed = {name: [c for c in some if c.case.measured.step_s] for name, some in sets.items()}
    lines = []
    for name, some in timed.items():
        if not some:
            continue
        if some[0].case.grade == "C":
            cells = (_mean_of_groups([*held_out.groups(some, judges[WAYS[0]])]), "", "")
        else:
            cells = tuple(_mean_of_groups([*held_out.groups(some, judges[way])]) for way in WAYS)
        lines.append(_line(name, len(some), cells))
    return lines


def _mean_of_groups(groups: Sequence[held_out.Group]) -> str:
    mean = statistics.fmean(statistics.fmean(map(abs, group.errors)) for group in groups)
    worst = max(groups, key=lambda group: abs(statistics.median(group.errors)))
    inside = statistics.fmean(one for group in groups for one in group.inside)
    return (
        f"{mean:.1%} over {len(groups)}; {statistics.median(worst.errors):+.0%} "
        f"({worst.name.replace(' | ', ' on ')}); {inside:.0%} inside"
    )


def _unfitted(new: Sequence[Comparison]) -> str:
    names = dict.fromkeys(c.case.group for c in new)
    return (
        f"No constant was fitted on {len(new)} of these rows: {'; '.join(names)}. The priors of "
        "the intervals, and what a dense mask costs, were fitted on rows of the other programs."
    )
