"""Errors by row, as CSV, and by group, as text."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.harnesses import GIB, Case
from benchmarks.accuracy.predictions import Predicted

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


_TITLES = {
    "allocated": "Peak allocated",
    "reserved": "Peak reserved",
    "device": "Device memory",
    "loaded": "Loaded memory",
    "forward": "Peak of the forward pass",
    "resident": "Allocated when a step has ended",
    "step_s": "Step time, never calibrated",
}


def _summary_cells(summary: Summary) -> str:
    rank = "" if summary.rank is None else f"{summary.rank:.3f}"
    return (
        f"{summary.rows} | {summary.median:.2%} | {summary.mean:.2%} | {summary.worst:+.2%} | "
        f"{summary.mean_signed:+.2%} | {rank}"
    )


_COLUMNS = (
    "row", "program", "grade", "model", "run",
    "predicted_gib", "measured_gib", "allocated", "reserved", "step",
)  # fmt: skip


def write_csv(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write a line for each row: allocated GiB, or GiB after a step, and the errors."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for members in groups(comparisons).values():
            writer.writerows(map(_cells, members))


def _cells(comparison: Comparison) -> list[str]:
    case, row = comparison.case, comparison.case.row
    method = row.notes.get("variant", "").partition("--")[0] or row.method
    batch, length = (case.configuration[n] for n in ("micro_batch", "max_length"))
    run = f"{method} {row.precision.split(' ')[0]}, {batch} x {length}, {row.gpu}"
    name = "allocated" if comparison.measured("allocated") else "resident"
    measured = comparison.measured(name)
    sizes = (getattr(comparison.predicted, name), measured) if measured else ()
    held = comparison.error("reserved")
    held = comparison.error("device") if held is None else held
    errors = [comparison.error(name), held, comparison.error("step_s")]
    return [
        *(str(row.number), case.group, case.grade, row.model.rpartition("/")[2], run),
        *([f"{size / GIB:.3f}" for size in sizes] or ["", ""]),
        *("" if error is None else f"{error:+.2%}" for error in errors),
    ]


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
