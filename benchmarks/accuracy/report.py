"""Errors by row and by group, as text and as the Markdown that docs and README quote."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.accuracy.harnesses import GIB, Case
from benchmarks.accuracy.predictions import Predicted
from benchmarks.accuracy.rows import Row

QUANTITIES = ("allocated", "reserved", "device", "loaded", "forward", "resident", "step_s")
"""What is compared."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One case and its prediction."""

    case: Case
    predicted: Predicted

    def measured(self, quantity: str) -> float | None:
        """What `quantity` is compared with, or None where nothing was measured."""
        value: float | None = getattr(self.case.measured, quantity)
        return value

    def error(self, quantity: str) -> float | None:
        """Predicted over measured minus 1, or None where nothing was measured."""
        measured = self.measured(quantity)
        if measured is None:
            return None
        value: float = getattr(self.predicted, quantity)
        return value / measured - 1


@dataclass(frozen=True, slots=True)
class Summary:
    """Absolute errors of some rows: how many, median, mean, worst; `mean_signed` has a sign."""

    rows: int
    median: float
    mean: float
    worst: float
    mean_signed: float
    rank: float | None
    """Spearman's rank correlation of predicted with measured; None for fewer than 3 rows."""


def summarise(comparisons: Iterable[Comparison], quantity: str) -> Summary | None:
    """The errors of `quantity`, or None where no row measured it."""
    members = [c for c in comparisons if c.measured(quantity) is not None]
    if not members:
        return None
    errors = [error for c in members if (error := c.error(quantity)) is not None]
    sizes = [abs(error) for error in errors]
    return Summary(
        rows=len(errors),
        median=statistics.median(sizes),
        mean=statistics.fmean(sizes),
        worst=max(errors, key=abs),
        mean_signed=statistics.fmean(errors),
        rank=rank_correlation(
            [float(getattr(c.predicted, quantity)) for c in members],
            [value for c in members if (value := c.measured(quantity)) is not None],
        ),
    )


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Spearman's; None for fewer than three values."""
    if len(set(predicted)) < 3 or len(set(measured)) < 3:
        return None
    return statistics.correlation(_ranks(predicted), _ranks(measured))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    return [first[value] + (ordered.count(value) + 1) / 2 for value in values]


def groups(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Comparisons by group, in the order of the table."""
    found: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        key = f"{comparison.case.group} ({comparison.case.grade})"
        found.setdefault(key, []).append(comparison)
    return found


def targets(comparisons: Sequence[Comparison]) -> dict[str, Sequence[Comparison]]:
    """The sets of rows for which targets are stated."""
    wanted = ("t4", "rtx4080", "a100_80gb")
    return {
        "T4, RTX 4080 and A100 rows, grade A": [
            c for c in comparisons if c.case.grade == "A" and c.case.gpu in wanted
        ],
        "grade B": [c for c in comparisons if c.case.grade == "B"],
        "grade C": [c for c in comparisons if c.case.grade == "C"],
    }


def verdicts(comparisons: Sequence[Comparison]) -> str:
    """How often "fits" and "runs out" were right, over runs that ended either way."""
    members = [c for c in comparisons if c.case.with_optimizer]
    fitted = [c for c in members if not c.case.ran_out]
    failed = [c for c in members if c.case.ran_out]
    wrong = [c.case.row.number for c in fitted if not c.predicted.fits]
    missed = [c.case.row.number for c in failed if c.predicted.fits]
    return (
        f"{len(fitted)} runs fitted: {len(fitted) - len(wrong)} were predicted to fit"
        f"{_rows(wrong)}. {len(failed)} ran out of memory: {len(failed) - len(missed)} were "
        f"predicted to run out{_rows(missed)}."
    )


def _rows(numbers: Sequence[int]) -> str:
    return f" (not rows {', '.join(map(str, numbers))})" if numbers else ""


def markdown(
    comparisons: Sequence[Comparison], refused: Sequence[tuple[Row, str]], closing: str
) -> str:
    """The closing table, groups, rows by program and those that cannot be expressed."""
    parts = [
        "# Predicted and measured, row by row\n",
        "## In short\n",
        closing,
        "## By group\n",
        *_tables(groups(comparisons)),
        "\n## Sets with a target\n",
        *_tables(targets(comparisons)),
        "\n## Does it fit\n",
        verdicts(comparisons),
        "\n## Every row\n",
        *_row_tables(comparisons),
        "\n## Rows that cannot be expressed\n",
        _reasons(refused),
    ]
    return "\n".join(parts) + "\n"


_TITLES = {
    "allocated": "Peak allocated",
    "reserved": "Peak reserved",
    "device": "Device memory",
    "loaded": "Loaded memory",
    "forward": "Peak of the forward pass",
    "resident": "Allocated when a step has ended",
    "step_s": "Step time, never calibrated",
}


def _tables(sets: dict[str, Sequence[Comparison]] | dict[str, list[Comparison]]) -> list[str]:
    tables = []
    for quantity in QUANTITIES:
        lines = [
            f"\n**{_TITLES[quantity]}**\n",
            "| rows of | rows | median | mean | worst | mean, signed | rank correlation |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for name, comparisons in sets.items():
            summary = summarise(comparisons, quantity)
            if summary is not None:
                lines.append(f"| {name} | {_summary_cells(summary)} |")
        tables.append("\n".join(lines))
    return tables


def _summary_cells(summary: Summary) -> str:
    rank = "" if summary.rank is None else f"{summary.rank:.3f}"
    return (
        f"{summary.rows} | {summary.median:.2%} | {summary.mean:.2%} | {summary.worst:+.2%} | "
        f"{summary.mean_signed:+.2%} | {rank}"
    )


_ROW_HEAD = (
    "| row | model | run | allocated or resident: predicted, measured GiB | error | "
    "reserved or device | step |\n|---:|---|---|---:|---:|---:|---:|"
)


def _row_tables(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """A table for each program."""
    for name, members in groups(comparisons).items():
        yield f"\n### {name}\n\n{_ROW_HEAD}"
        yield from map(_row_line, members)


def _row_line(comparison: Comparison) -> str:
    row = comparison.case.row
    method = row.notes.get("variant", "").partition("--")[0] or row.method
    batch, length = (comparison.case.configuration[n] for n in ("micro_batch", "max_length"))
    run = f"{method} {row.precision.split(' ')[0]}, {batch} x {length}, {row.gpu}"
    name = "allocated" if comparison.measured("allocated") else "resident"
    measured = comparison.measured(name)
    sizes = ""
    if measured:
        sizes = f"{getattr(comparison.predicted, name) / GIB:.3f}, {measured / GIB:.3f}"
    held = comparison.error("reserved")
    held = comparison.error("device") if held is None else held
    cells = [comparison.error(name), held, comparison.error("step_s")]
    shown = " | ".join("" if error is None else f"{error:+.2%}" for error in cells)
    return f"| {row.number} | {row.model.rpartition('/')[2]} | {run} | {sizes} | {shown} |"


def _reasons(refused: Sequence[tuple[Row, str]]) -> str:
    count: dict[tuple[str, str], int] = {}
    for row, reason in refused:
        key = (row.framework.partition(";")[0], reason)
        count[key] = count.get(key, 0) + 1
    lines = ["| rows | program | reason |", "|---:|---|---|"]
    lines += [f"| {n} | {framework} | {reason} |" for (framework, reason), n in count.items()]
    return "\n".join(lines)


def text(comparisons: Sequence[Comparison], write: Callable[[str], None]) -> None:
    """The groups and the sets with a target, one line each, for a terminal."""
    write(verdicts(comparisons))
    for sets in (groups(comparisons), targets(comparisons)):
        for name, members in sets.items():
            write(name)
            for quantity in QUANTITIES:
                summary = summarise(members, quantity)
                if summary is not None:
                    cells = _summary_cells(summary).replace(" | ", "  ")
                    write(f"    {_TITLES[quantity]:46} {cells}")
