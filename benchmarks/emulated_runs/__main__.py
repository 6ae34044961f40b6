"""`python -m benchmarks.emulated_runs`: run published programs on emulated GPUs and compare."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.accuracy.rows import read_rows
from benchmarks.emulated_runs.environments import ENVIRONMENTS
from benchmarks.emulated_runs.programs import program_of
from benchmarks.emulated_runs.running import run, save, saved
from benchmarks.emulated_runs.table import write_csv

TABLE = Path(__file__).with_name("emulated.csv")
ROWS = (
    # fitcheck-llm: both releases of PyTorch, attention both ways, NF4 and fp16, each model
    *(0, 7, 9, 13, 20, 22, 23, 26, 28, 32, 34, 38, 40, 41, 42, 44, 46, 47),
    *(48, 49, 52, 56),  # canifinetune: LoRA, NF4, without checkpointing
    *(428, 429),  # fitscout
)
"""Rows of benchmarks/accuracy/measured_runs.csv that run by default."""


def main() -> None:
    """Run the benchmark; rows that have run are not run again, and all go to emulated.csv."""
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
    parser.add_argument("--again", action="store_true", help="also rows that have run")
    arguments = parser.parse_args()
    root: Path = arguments.environments.absolute()
    root.mkdir(parents=True, exist_ok=True)
    results = root / "results.jsonl"
    rows = {row.number: row for row in read_rows()}
    wanted = [int(n) for n in arguments.rows.split(",")] if arguments.rows else ROWS
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
    write_csv(saved(results).values(), rows, TABLE)


if __name__ == "__main__":
    main()
