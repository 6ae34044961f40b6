"""The measured table: published fine-tuning runs, one row each, with their source."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tuner.core.errors import InputError, Problem

TABLE = Path(__file__).parent / "measured_runs.csv"
"""All rows of the survey, those that cannot be expressed included."""


_COLUMNS = (
    "source_url", "model", "gpu", "precision", "method", "lora_rank", "lora_targets",
    "micro_batch", "grad_accum", "seq_len", "grad_ckpt", "optimizer", "attention", "framework",
    "peak_mem_gib", "throughput_value", "notes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One published run. `number` is its place in the table; sizes are in GiB."""

    number: int
    source_url: str
    model: str
    gpu: str
    precision: str
    method: str
    lora_rank: int
    """0 for full fine-tuning, and where a method has no rank."""
    lora_targets: tuple[str, ...]
    micro_batch: int | None
    grad_accum: int
    length: int | None
    checkpointing: bool
    optimizer: str
    attention: str
    framework: str
    peak_gib: float | None
    throughput: float | None
    grade: str
    """"A": code, versions and token shapes are public. "B": one of them is inferred."""
    notes: Mapping[str, str]

    def note(self, name: str) -> float | None:
        """The number at the start of a note, or None where there is none."""
        words = self.notes.get(name, "").split()
        return _number(words[0], name) if words else None

    @property
    def tokens(self) -> int:
        """Tokens of one micro-step at full length."""
        return (self.micro_batch or 0) * (self.length or 0)


def read_rows(path: Path = TABLE) -> list[Row]:
    """All rows, in the order of the file. Raises `InputError` with every row that is none."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as a table: {error}") from error
    rows: list[Row] = []
    problems: list[Problem] = []
    for number, cells in enumerate(found):
        where = f"{path}, row {number}"
        lacking = [name for name in _COLUMNS if not isinstance(cells.get(name), str)]
        if lacking:
            problems.append(Problem(f"has no {', '.join(lacking)}", where))
            continue
        try:
            rows.append(_row(number, cells))
        except InputError as error:
            problems.append(Problem(error.message, where))
    if problems:
        raise InputError(f"{path} is not a table of measured runs", problems=problems[:20])
    return rows


def _row(number: int, cells: Mapping[str, str]) -> Row:
    notes = dict(part.split("=", 1) for part in cells["notes"].split("; ") if "=" in part)
    return Row(
        number=number,
        source_url=cells["source_url"],
        model=cells["model"],
        gpu=cells["gpu"],
        precision=cells["precision"],
        method=cells["method"],
        lora_rank=_whole(cells["lora_rank"]) or 0,
        lora_targets=tuple(cells["lora_targets"].split("+")) if cells["lora_targets"] else (),
        micro_batch=_whole(cells["micro_batch"]),
        grad_accum=_whole(cells["grad_accum"]) or 1,
        length=_whole(cells["seq_len"]),
        checkpointing=cells["grad_ckpt"] == "true",
        optimizer=cells["optimizer"],
        attention=cells["attention"],
        framework=cells["framework"],
        peak_gib=_measured(cells, "peak_mem_gib"),
        throughput=_measured(cells, "throughput_value"),
        grade=_grade(notes),
        notes=notes,
    )


def _measured(cells: Mapping[str, str], name: str) -> float | None:
    return _number(cells[name], name) if cells[name] else None


def _number(text: str, name: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{name} is {text[:40]!r}, and not a number")
    return number


def _grade(notes: Mapping[str, str]) -> str:
    if "repro" not in notes:
        raise InputError("notes do not say how well it can be repeated (repro=A)")
    return notes["repro"]


def _whole(text: str) -> int | None:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        return None  # the survey writes "variable" and the like where a run had no fixed value
