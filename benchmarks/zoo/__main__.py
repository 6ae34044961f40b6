"""`python -m benchmarks.zoo`: run famous programs on emulated GPUs, and write what came of them.

    python -m benchmarks.zoo trl_sft trl_dpo --environments FOLDER
    python -m benchmarks.zoo --all --environments FOLDER --sources MIRRORS
    python -m benchmarks.zoo --page

Rows are kept in benchmarks/zoo/results.jsonl; a program that has one is run with --again only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.zoo.entries import names, read
from benchmarks.zoo.page import PAGE, page
from benchmarks.zoo.running import Places, Row, keep, kept, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs that are named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo")
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs to run")
    parser.add_argument("--all", action="store_true", help="run every program")
    parser.add_argument("--again", action="store_true", help="also programs that have a row")
    parser.add_argument("--tiny", action="store_true", help="with tiny models; no row is kept")
    parser.add_argument("--environments", type=Path, help="folder for what is made once")
    parser.add_argument(
        "--base", type=Path, default=Path(sys.executable), help="interpreter with a CUDA build"
    )
    parser.add_argument(
        "--sources",
        type=Path,
        help="folder of bare repositories, OWNER+NAME/repo; cloned from GitHub without it",
    )
    parser.add_argument("--page", action="store_true", help="write docs/notebook/zoo.md")
    options = parser.parse_args(arguments)
    wanted = names() if options.all else options.names
    if wanted and options.environments is None:
        parser.error("give --environments: a folder for environments, models and data")
    for name in wanted:
        if name in kept() and not options.again and not options.tiny:
            continue
        places = Places(options.environments.absolute(), options.base, options.sources)
        row = run(read(name), places, tiny=options.tiny)
        show(row)
        if not options.tiny:
            keep(row)
    if options.page:
        PAGE.write_text(page(kept()), encoding="utf-8")
    return 0


def show(row: Row) -> None:
    """Print what came of one program."""
    if row.kind != "answered":
        print("\n".join(row.output), file=sys.stderr)
    step = "" if row.step_s is None else f", step {row.step_s:.2f} s"
    reckoned = "" if row.arithmetic_gib is None else f" (arithmetic {row.arithmetic_gib:.2f})"
    print(
        f"{row.name}: {row.kind}; {row.ended}, {row.steps} steps,"
        f" {row.peak_allocated_bytes / 2**30:.3f} GiB allocated{reckoned}{step},"
        f" took {row.took_s:.0f} s ({row.processor_s:.0f} s of processor) {row.reason}",
        flush=True,
    )
    parts = {name: f"{size / 2**30:.2f}" for name, size in row.breakdown.items()}
    print("   ", " ".join(f"{name} {size}" for name, size in parts.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
