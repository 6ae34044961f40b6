"""The page of published programs on emulated GPUs: docs/notebook/emulated_tables.md."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.accuracy.rows import Row
from benchmarks.emulated_runs.programs import Program, program_of
from benchmarks.emulated_runs.running import Outcome

QUANTITIES = {
    "allocated": "peak allocated",
    "reserved": "peak reserved",
    "loaded": "allocated after loading",
    "forward": "peak of the forward pass",
}

_START = """# Published programs on emulated GPUs

Written by `python -m benchmarks.emulated_runs --markdown docs/notebook/emulated_tables.md`. Others
measured these runs on real GPUs and published program, versions and result. Here **the same
program, not changed in a line, ran on the emulated GPU**, with the row's releases of PyTorch,
transformers, peft and bitsandbytes where nothing else is said, and hollow checkpoints in a local
hub cache in place of the weights. Every number under *emulated* is what the program itself printed
there; it is not a measurement. Values are in GiB; *exact* means equal in all digits
that the row has.
"""

_FOUND = """## What decides memory and is in no formula

- **Addresses.** PyTorch up to 2.10 takes the lowest address among free blocks of one size, and the
  driver hands out falling addresses (segments of 2 MiB rise within areas of 32 MiB), so the newest
  segment is taken first. With rising addresses TinyLlama 2 x 1024 (row 28) reserved 3.758 GiB in
  place of 4.127, and SmolLM2 4 x 1024 (row 13) 7.803 in place of 7.553. The emulated driver gives
  falling addresses now.
- **Releases.** PyTorch 2.13 and 2.14 take the oldest segment first, wherever it lies. Rows 13 and
  28, which their source puts under torch 2.14.0, reserved what 2.10 does, to the last digit, and
  not what 2.14.0 does (both were run in both environments, below): label and rows do not fit
  together, and why is not known. What they allocate is the same in both.
- **Threads that load.** transformers 5 reads weights with threads. How far they run ahead decides
  which cached blocks 4-bit weights land in, and so up to 10 MiB that stay allocated: the source's
  own loads of TinyLlama in NF4 left 1.0450 to 1.0523 GiB. Emulated programs load in turn (1.0489,
  one of the values that were measured), unless `HF_DEACTIVATE_ASYNC_LOAD=0` is set.
"""


@dataclass(frozen=True, slots=True)
class Value:
    """One quantity of one row."""

    row: Row
    program: Program
    outcome: Outcome
    quantity: str

    @property
    def emulated(self) -> float:
        """In GiB."""
        return self.outcome.emulated[self.quantity]

    @property
    def measured(self) -> float:
        """In GiB."""
        return self.outcome.measured[self.quantity]

    @property
    def error(self) -> float:
        """Emulated over measured, minus 1."""
        return self.emulated / self.measured - 1

    @property
    def is_exact(self) -> bool:
        """Whether all digits are the same that the row gives."""
        return abs(self.emulated - self.measured) <= 0.5000001 * 10**-self.program.decimals

    @property
    def cells(self) -> list[str]:
        """Of the table."""
        digits = self.program.decimals
        difference = "exact" if self.is_exact else f"{self.error:+.2%}"
        numbers = [f"{self.emulated:.{digits}f}", f"{self.measured:.{digits}f}", difference]
        return [*_settings(self.row, self.outcome), QUANTITIES[self.quantity], *numbers]


def page(
    outcomes: Sequence[Outcome],
    rows: Mapping[int, Row],
    *,
    start: str = _START,
    found: str = _FOUND,
) -> str:
    """The page in Markdown; `start` comes before the summary, `found` after it."""
    ordered = sorted(outcomes, key=lambda one: (bool(one.note), one.row))
    values = [value for outcome in ordered for value in _values(rows[outcome.row], outcome)]
    parts = [start, _summary(values), found]
    for name in dict.fromkeys(value.program.name for value in values):
        header = ("row", "model", "GPU", "settings", "torch", "quantity")
        table = _table(
            (*header, "emulated", "measured", "difference"),
            [value.cells for value in values if value.program.name == name],
        )
        parts.append(f"## {name}\n{_note(name, values)}\n{table}")
    parts.append(_failures(outcomes, rows))
    return "\n".join(parts).rstrip() + "\n"


def _values(row: Row, outcome: Outcome) -> list[Value]:
    program = program_of(row)
    assert not isinstance(program, str), program
    both = [name for name in QUANTITIES if name in outcome.emulated and name in outcome.measured]
    return [Value(row, program, outcome, name) for name in both]


def _settings(row: Row, outcome: Outcome) -> list[str]:
    rank = f"r {row.lora_rank}" if row.lora_rank else row.method
    settings = f"{row.precision}, {rank}, {row.attention}, {row.micro_batch} x {row.length}"
    settings += f", {row.grad_accum} micro-batches" if row.grad_accum > 1 else ""
    settings += "" if row.checkpointing else ", no checkpointing"
    settings += f", {row.notes['scales']} scales" if "scales" in row.notes else ""
    ranks = int(row.note("num_gpus") or 1)
    settings += f", {ranks} ranks" if ranks > 1 else ""
    torch = outcome.torch.partition("+")[0]
    return [str(row.number), row.model.rpartition("/")[2], row.gpu, settings, torch]


def _note(name: str, values: Iterable[Value]) -> str:
    notes = {v.outcome.note for v in values if v.program.name == name and v.outcome.note}
    return "".join(f"\nNot with the row's versions: {note}.\n" for note in sorted(notes))


def _summary(values: Sequence[Value]) -> str:
    cells = []
    for same, title in ((True, "with the row's versions"), (False, "with other versions")):
        for quantity, words in QUANTITIES.items():
            chosen = [v for v in values if v.quantity == quantity and (not v.outcome.note) == same]
            if not chosen:
                continue
            errors = [0.0 if v.is_exact else abs(v.error) for v in chosen]
            exact = sum(v.is_exact for v in chosen)
            median, worst = statistics.median(errors), max(errors)
            cells.append(
                [title, words, str(len(chosen)), str(exact), f"{median:.2%}", f"{worst:.2%}"]
            )
    return _table(("runs", "quantity", "number", "exact", "median error", "worst"), cells)


def _failures(outcomes: Sequence[Outcome], rows: Mapping[int, Row]) -> str:
    failed = [
        [str(one.row), rows[one.row].model, one.environment, one.failure.replace("\n", " ")[:300]]
        for one in outcomes
        if one.failure
    ]
    ran = {one.row for one in outcomes}
    parts = ["## What failed, and what was not run\n"]
    parts.append(
        _table(("row", "model", "environment", "why"), failed) if failed else "No run failed.\n"
    )
    found = {row.number: program_of(row) for row in rows.values()}
    reasons = Counter(reason for reason in found.values() if isinstance(reason, str))
    parts += [f"- {count} rows: {reason}." for reason, count in reasons.most_common()]
    left = sum(
        not isinstance(program_of(row), str) and row.number not in ran for row in rows.values()
    )
    parts.append(f"- {left} more rows of these programs, which differ in length, batch or model.")
    unknown: Counter[str] = Counter()
    for outcome in outcomes:
        unknown.update(outcome.unknown_calls)
    if unknown:
        names = ", ".join(f"`{name}` ({calls})" for name, calls in unknown.most_common())
        parts.append(f"- Functions that were called and are not emulated: {names}.")
    return "\n".join(parts)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
