"""The measured table: published fine-tuning runs, one row each, with their source."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).parent / "measured_runs.csv"
"""All rows of the survey, those that cannot be expressed included."""


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
        return float(words[0]) if words else None

    @property
    def tokens(self) -> int:
        """Tokens of one micro-step at full length."""
        return (self.micro_batch or 0) * (self.length or 0)


def read_rows(path: Path = TABLE) -> list[Row]:
    """All rows, in the order of the file."""
    with path.open(newline="") as file:
        return [_row(number, cells) for number, cells in enumerate(csv.DictReader(file))]


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
        peak_gib=float(cells["peak_mem_gib"]) if cells["peak_mem_gib"] else None,
        throughput=float(cells["throughput_value"]) if cells["throughput_value"] else None,
        grade=notes["repro"],
        notes=notes,
    )


def _whole(text: str) -> int | None:
    try:
        return int(float(text))
    except ValueError:
        return None  # the survey writes "variable" and the like where a run had no fixed value
