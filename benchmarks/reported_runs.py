"""Writes docs/notebook/reported_runs.md, and checks the rows in benchmarks/reported_runs.

    python -m benchmarks.reported_runs            # write the page
    python -m benchmarks.reported_runs --check    # exit code 1 if a row is implausible

`tuner report-run` makes the rows, one file each. Nothing is computed: the predictions are those
that were made before the run.
"""

from __future__ import annotations

import argparse
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median

from tuner.core.errors import InputError
from tuner.core.units import format_duration, format_size
from tuner.report.prediction_error import QUANTITIES
from tuner.report.reported import (
    ReportedRun,
    duplicates,
    looks_of,
    problems_of,
    read_row,
    read_rows,
)

ROWS = Path(__file__).with_suffix("")
PAGE = Path(__file__).resolve().parents[1] / "docs/notebook/reported_runs.md"

INTRODUCTION = """\
# Reported runs

Written by `python -m benchmarks.reported_runs` from the files in `benchmarks/reported_runs`: runs
that were *measured*, each beside what was *predicted* before it ran. [Share a
run](../share-a-run.md) says how to add yours.
"""
_SHOWN = (
    "precision",
    "lora_rank",
    "micro_batch",
    "grad_accum",
    "max_length",
    "optimizer",
    "attention",
    "gradient_checkpointing",
)


def main() -> int:
    """Write the page, or check the rows."""
    parser = argparse.ArgumentParser(description="Page and validator of reported runs.")
    parser.add_argument("--check", action="store_true", help="check the rows, write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(page(read_rows(ROWS).values()))
        return 0
    refused, named = check(ROWS)
    for text in refused:
        print(f"refused: {text}")
    for text in named:
        print(f"look at: {text}")
    print(f"{len(list(ROWS.glob('*.json')))} rows, {len(refused)} problems")
    return 1 if refused else 0


# -- the validator --------------------------------------------------------------------------------


def check(folder: Path) -> tuple[list[str], list[str]]:
    """What is implausible in the rows of a folder, and what is only far from its prediction."""
    refused, named = [], []
    rows: dict[str, ReportedRun] = {}
    for path in sorted(folder.iterdir()):
        try:
            row = read_row(path)
        except InputError as error:
            refused.append(error.message)
            continue
        rows[path.name] = row
        problems = list(problems_of(row))
        if row.reporter is None:
            problems.append("no reporter: `tuner report-run` adds one")
        if path.name != row.file_name:
            problems.append(f"its content belongs in {row.file_name}")
        refused += [f"{path.name}: {text}" for text in problems]
        named += [f"{path.name}: {text}" for text in looks_of(row)]
    refused += [f"{one}: the same run as {other}" for one, other in duplicates(rows)]
    refused += _several_reporters(rows, authors(folder))
    return refused, named


def _several_reporters(
    rows: Mapping[str, ReportedRun], author_of: Mapping[str, str]
) -> Iterator[str]:
    """One author is one voice, from however many machines: another file has another reporter."""
    reporters: dict[str, str] = {}
    for name, row in rows.items():
        author = author_of.get(name)
        if author is None or row.reporter is None:
            continue
        first = reporters.setdefault(author, row.reporter)
        if first != row.reporter:
            yield f"{name}: its author has rows of reporter {first}; write that one"


def authors(folder: Path) -> dict[str, str]:
    """Who added each file, by git's history; empty outside of a repository.

    It is empty in a shallow one, too, whose oldest commit seems to add everything.
    """

    def git(*words: str) -> str:
        command = ["git", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout

    log = ("log", "--diff-filter=A", "--no-renames", "--format=%x00%ae", "--name-only", "--", ".")
    try:
        is_shallow = git("rev-parse", "--is-shallow-repository").strip() == "true"
        told = "" if is_shallow else git(*log)
    except (OSError, subprocess.CalledProcessError):
        return {}
    found = {}
    for commit in told.split("\0")[1:]:
        author, *names = commit.split()
        found |= {Path(name).name: author for name in names}
    return found


# -- the page -------------------------------------------------------------------------------------


def page(rows: Iterable[ReportedRun]) -> str:
    """The text of the page: a table of each GPU type."""
    by_gpu: dict[str, list[ReportedRun]] = defaultdict(list)
    for row in rows:
        by_gpu[row.gpu].append(row)
    parts = [INTRODUCTION]
    for gpu, own in sorted(by_gpu.items()):
        own.sort(key=lambda row: (row.model or "", row.measured.step_s or 0))
        parts += [
            f"## {gpu}\n",
            _summary(own),
            "",
            "| model | device | settings | memory, measured | predicted | step, measured "
            "| predicted |",
            "|---|---|---|---:|---:|---:|---:|",
            *map(_line, own),
            "",
        ]
    return "\n".join(parts)


def _summary(rows: list[ReportedRun]) -> str:
    told = []
    for quantity in QUANTITIES:
        errors = [abs(1 / ratio - 1) for row in rows if (ratio := row.ratio(quantity.name))]
        if errors:
            told.append(f"{quantity.label} {median(errors):.1%}")
    counts = [
        (len(rows), "run"),
        (len({_name(row) for row in rows}), "model"),
        (len({row.reporter for row in rows}), "reporter"),
    ]
    runs, models, reporters = (f"{n} {word}{'s' * (n > 1)}" for n, word in counts)
    return f"{runs} of {models} by {reporters}. Median error: {', '.join(told)}."


def _name(row: ReportedRun) -> str:
    if row.model:
        return row.model
    fields = row.architecture or {}
    return (
        f"private {fields.get('model_type', 'model')}, {fields.get('num_hidden_layers', '?')}"
        + (f" x {fields.get('hidden_size', '?')}")
    )


def _line(row: ReportedRun) -> str:
    settings = " ".join(
        f"{name}={row.configuration[name]}" for name in _SHOWN if name in row.configuration
    )
    cells = [_name(row), row.device, ", ".join([settings, *row.disturbed])]
    for name, text in (("device_bytes", format_size), ("step_s", format_duration)):
        measured, predicted = getattr(row.measured, name), getattr(row.predicted, name)
        cells.append("?" if measured is None else text(measured))
        change = "" if not (measured and predicted) else f" ({predicted / measured - 1:+.1%})"
        cells.append("?" if predicted is None else f"{text(predicted)}{change}")
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    raise SystemExit(main())
