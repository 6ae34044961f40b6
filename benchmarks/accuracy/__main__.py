"""`python -m benchmarks.accuracy`: predict the measured table and report the errors.

Without `--only`, the error of each row is written to benchmarks/accuracy/predictions.csv.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.accuracy import held_out, numbers
from benchmarks.accuracy.chart import TABLE
from benchmarks.accuracy.harnesses import Case, express
from benchmarks.accuracy.peers import estimate_all, table
from benchmarks.accuracy.predictions import predict_all
from benchmarks.accuracy.report import Comparison, groups, text, write_csv
from benchmarks.accuracy.rows import read_rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--only", default="", help="only programs whose name contains this")
    parser.add_argument("--peers", action="store_true", help="compare with other estimates")
    parser.add_argument("--fitcheck", help="interpreter of an environment with fitcheck-llm")
    parser.add_argument("--canifinetune", help="the same with canifinetune")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    cases: list[Case] = []
    refused = []
    for row in read_rows():
        if arguments.only not in row.framework:
            continue
        case = express(row)
        if isinstance(case, Case):
            cases.append(case)
        else:
            refused.append((row, case))
    print(f"{len(cases)} rows can be expressed, {len(refused)} cannot")
    started = time.monotonic()
    comparisons = [
        Comparison(cases[index], predicted)
        for index, predicted in predict_all(cases, processes=arguments.processes)
    ]
    print(f"predicted in {time.monotonic() - started:.0f} s\n")
    text(comparisons, print)
    timed = held_out.timed_rows(comparisons)
    judges = held_out.judges(timed)
    print(held_out.text(timed, judges), numbers.text(comparisons, refused, judges), sep="\n\n")
    if arguments.peers:
        names = ("fitcheck", "canifinetune")
        pythons = {name: path for name in names if (path := getattr(arguments, name))}
        compared = [c for c in comparisons if c.case.measured.allocated is not None]
        estimates = estimate_all([c.case for c in compared], pythons)
        predicted = [c.predicted for c in compared]
        for title, members in groups(compared).items():
            wanted = [index for index, c in enumerate(compared) if c in members]
            found = table([c.case for c in compared], predicted, estimates, wanted)
            print(f"\n{title}\n{found}")
    if not arguments.only:
        write_csv(comparisons, TABLE)


if __name__ == "__main__":
    main()
