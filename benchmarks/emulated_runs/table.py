"""What programs printed on emulated GPUs beside what was measured, as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks.accuracy.rows import Row
from benchmarks.emulated_runs.programs import program_of
from benchmarks.emulated_runs.running import Outcome

QUANTITIES = {
    "allocated": "peak allocated",
    "reserved": "peak reserved",
    "loaded": "allocated after loading",
    "forward": "peak of the forward pass",
}
_COLUMNS = (
    "program", "row", "model", "gpu", "settings", "torch", "note", "quantity",
    "emulated_gib", "measured_gib", "difference",
)  # fmt: skip


def write_csv(outcomes: Iterable[Outcome], rows: Mapping[int, Row], path: Path) -> None:
    """Write a line for each quantity of each run; `note` says how its releases differ."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for outcome in sorted(outcomes, key=lambda one: (one.row, one.environment)):
            writer.writerows(_lines(rows[outcome.row], outcome))


def _lines(row: Row, outcome: Outcome) -> Iterator[list[str]]:
    program = program_of(row)
    assert not isinstance(program, str), program
    torch = outcome.torch.partition("+")[0]
    run = [str(row.number), row.model.rpartition("/")[2], row.gpu, _settings(row), torch]
    digits = program.decimals
    for name, quantity in QUANTITIES.items():
        emulated, measured = outcome.emulated.get(name), outcome.measured.get(name)
        if emulated is None or measured is None:
            continue
        is_exact = abs(emulated - measured) <= 0.5000001 * 10**-digits
        difference = "exact" if is_exact else f"{emulated / measured - 1:+.2%}"
        sizes = [f"{emulated:.{digits}f}", f"{measured:.{digits}f}"]
        yield [program.name, *run, outcome.note, quantity, *sizes, difference]


def _settings(row: Row) -> str:
    rank = f"r {row.lora_rank}" if row.lora_rank else row.method
    settings = f"{row.precision}, {rank}, {row.attention}, {row.micro_batch} x {row.length}"
    return settings + ("" if row.checkpointing else ", no checkpointing")
