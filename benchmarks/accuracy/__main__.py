"""`python -m benchmarks.accuracy`: predict the measured table and report the errors."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.accuracy import held_out, numbers
from benchmarks.accuracy.harnesses import Case, express
from benchmarks.accuracy.peers import estimate_all, table
from benchmarks.accuracy.predictions import predict_all
from benchmarks.accuracy.report import Comparison, groups, markdown, targets, text
from benchmarks.accuracy.rows import read_rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
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
    left_out, closing = held_out.text(timed, judges), numbers.text(comparisons, refused, judges)
    print(left_out, closing, sep="\n\n")
    tables = f"{markdown(comparisons, refused, closing)}\n## Held out\n{left_out}\n"
    if arguments.peers:
        names = ("fitcheck", "canifinetune")
        pythons = {name: path for name in names if (path := getattr(arguments, name))}
        compared = [c for c in comparisons if c.case.measured.allocated is not None]
        estimates = estimate_all([c.case for c in compared], pythons)
        sets = {**groups(compared), **targets(compared)}
        for title, members in sets.items():
            wanted = [index for index, c in enumerate(compared) if c in members]
            if wanted:
                found = table(
                    [c.case for c in compared], [c.predicted for c in compared], estimates, wanted
                )
                print(f"\n{title}\n{found}")
                tables += f"\n## Peers: {title}\n\n{found}\n"
    if arguments.markdown:
        arguments.markdown.write_text(tables)


if __name__ == "__main__":
    main()
