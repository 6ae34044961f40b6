"""Writes docs/notebook/emulated_programs.md: programs as people write them, emulated.

    python -m benchmarks.programs --markdown docs/notebook/emulated_programs.md
    python -m benchmarks.programs --only liger --python /other/venv/bin/python

What was found is kept in benchmarks/programs/found.json, so that programs which need different
environments come together on one page. `--tiny` runs all with tiny models, and keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.programs.catalogue import programs
from benchmarks.programs.models import make
from benchmarks.programs.page import page
from benchmarks.programs.running import Row, run

FOUND = Path(__file__).with_name("found.json")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--only", help="programs, with commas between them")
    parser.add_argument("--tiny", action="store_true", help="tiny models; nothing is kept")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs them")
    parser.add_argument("--models", type=Path, help="folder for the hollow checkpoints")
    parser.add_argument("--timeout", type=float, default=600, help="of each program, in seconds")
    parser.add_argument("--markdown", type=Path, help="the page to write")
    options = parser.parse_args(arguments)
    rows = kept()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.models or Path(temporary)
        for program in programs(options.only):
            model = make(program.model, folder, tiny=options.tiny)
            row = run(
                program,
                model.absolute(),
                python=options.python,
                tiny=options.tiny,
                timeout_s=options.timeout,
            )
            show(row)
            if not options.tiny and (row.ended != "skipped" or row.program not in rows):
                rows[row.program] = row
                keep(rows)
    if options.markdown is not None:
        options.markdown.write_text(page(rows), encoding="utf-8")
    return 0


def show(row: Row) -> None:
    """What came of one program, for the one who waits."""
    if row.ended not in {"steps", "skipped"}:
        print("\n".join(row.output), file=sys.stderr)
    print(
        f"{row.program}: {row.ended}, {row.steps} steps, {row.peak_allocated_bytes / 2**30:.3f} GiB"
        f" allocated, step {row.step_s}, took {row.took_s:.1f} s {row.reason}",
        flush=True,
    )
    print("\n".join(f"    {line}" for line in row.output[-8:]), flush=True)


def kept() -> dict[str, Row]:
    """What was found before, by program."""
    if not FOUND.exists():
        return {}
    return {row["program"]: Row(**row) for row in json.loads(FOUND.read_text(encoding="utf-8"))}


def keep(rows: dict[str, Row]) -> None:
    """For later runs with other programs or another environment."""
    plain = [{**row.to_dict(), "output": []} for row in rows.values()]
    FOUND.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
