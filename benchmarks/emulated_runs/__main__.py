"""`python -m benchmarks.emulated_runs`: run published programs on emulated GPUs and compare."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.accuracy.rows import read_rows
from benchmarks.emulated_runs.environments import ENVIRONMENTS
from benchmarks.emulated_runs.page import page
from benchmarks.emulated_runs.programs import program_of
from benchmarks.emulated_runs.rivals import rival_rows
from benchmarks.emulated_runs.rivals_page import rivals_page
from benchmarks.emulated_runs.running import run, save, saved

ROWS = (
    # fitcheck-llm: both releases of PyTorch, attention both ways, NF4 and fp16, each model
    *(0, 7, 9, 13, 20, 22, 23, 26, 28, 32, 34, 38, 40, 41, 42, 44, 46, 47),
    *(48, 49, 52, 56),  # canifinetune: LoRA, NF4, without checkpointing
    *(428, 429),  # fitscout
)
"""Rows of benchmarks/accuracy/measured_runs.csv that run by default."""


def main() -> None:
    """Run the benchmark; rows that have run are not run again."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulated_runs", description=__doc__)
    parser.add_argument(
        "--environments",
        type=Path,
        required=True,
        help="folder for virtual environments (17 GB), programs, models and results",
    )
    parser.add_argument("--rows", help="numbers of rows, with commas")
    parser.add_argument(
        "--environment", choices=ENVIRONMENTS, help="run them in this one, not in that of the row"
    )
    parser.add_argument(
        "--rivals", action="store_true", help="the rows of FakeGPU and torch-preflight"
    )
    parser.add_argument("--again", action="store_true", help="also rows that have run")
    parser.add_argument("--markdown", type=Path, help="write the page to this file")
    arguments = parser.parse_args()
    root: Path = arguments.environments.absolute()
    root.mkdir(parents=True, exist_ok=True)
    results = root / "results.jsonl"
    rows = {row.number: row for row in (rival_rows() if arguments.rivals else read_rows())}
    default = tuple(rows) if arguments.rivals else ROWS
    wanted = [int(n) for n in arguments.rows.split(",")] if arguments.rows else default
    for number in wanted:
        program = program_of(rows[number])
        if isinstance(program, str):
            parser.error(f"row {number}: {program}")
        made = ENVIRONMENTS.get(arguments.environment) or program.environment(rows[number])
        if (number, made.name) in saved(results) and not arguments.again:
            continue
        outcome = run(rows[number], program, root, made)
        save(outcome, results)
        took = f"{outcome.duration_s:.0f} s"
        print(number, made.name, program.name, outcome.failure or "", took, flush=True)
        for name, value in outcome.emulated.items():
            print(f"  {name}: emulated {value:.4f}, measured {outcome.measured.get(name)}")
    if arguments.markdown:
        outcomes = [one for one in saved(results).values() if one.row in rows]
        text = (rivals_page if arguments.rivals else page)(outcomes, rows)
        arguments.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
