"""Writes the table of libraries that aren't installed: tuner/program/releases.json.

    python -m benchmarks.releases
    python -m benchmarks.releases --folder UNPACKED_WHEELS

A package is looked for in each --folder first, then among the installed ones. What is not found
keeps the rows that the file has.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import distributions
from pathlib import Path

from tuner.program.releases import FILE
from tuner.program.sources import SOURCES, Reader


def main() -> None:
    """Write the file anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, action="append", default=[])
    folders = [*parser.parse_args().folder, *map(Path, sys.path)]
    table = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name, wanted in SOURCES.items():
        for folder in folders:
            found = next(iter(distributions(name=name, path=[str(folder)])), None)
            if found is not None and (folder / name).is_dir():
                rows = Reader(name, folder / name, (2, 13)).read(wanted)
                table[name] = {"release": found.version.partition("+")[0], "rows": rows}
                break
    lines = []
    for name, part in sorted(table.items()):
        rows = [f"  {json.dumps(n)}: {json.dumps(r)}" for n, r in sorted(part["rows"].items())]
        head = f' {json.dumps(name)}: {{"release": {json.dumps(part["release"])}, "rows": {{'
        lines.append("\n".join((head, ",\n".join(rows), " }}")))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
