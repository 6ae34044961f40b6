"""Writes the table of libraries that aren't installed: tuner/program/releases.json.

    python -m benchmarks.releases
    python -m benchmarks.releases --folder UNPACKED_WHEELS --history RELEASES

A package is looked for in each --folder first, then among the installed ones. What is not found
keeps the rows that the file has. --history names a folder of other releases, such as
`RELEASES/0.19.1/trl`: from those is written until and since when a class has taken an argument.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from typing import Any

from packaging.version import Version

from tuner.program.releases import FILE
from tuner.program.sources import SOURCES, Reader

TORCH = (2, 13)
"""The release by which the libraries choose some of their defaults."""

TOOLS = ("axolotl", "llamafactory")
"""Libraries of which only names are written."""

ALSO = {"llamafactory.TrainingArguments": " logging_dir warmup_ratio"}
"""Names of LLaMA-Factory's newest transformers, 5.6, which later ones lack."""

LOADING = {"load_in_4bit", "load_in_8bit", "use_flash_attention_2", "use_auth_token", "dtype"}
"""Names of `from_pretrained` that have a history; many of its words are no arguments."""

Rows = Mapping[str, Mapping[str, Any]]


def read_table(folders: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is found in the folders, by library."""
    for name in SOURCES:
        for folder in folders:
            found = next(iter(distributions(name=name, path=[str(folder)])), None)
            if found is not None and (folder / name).is_dir():
                rows = Reader(name, folder / name, TORCH).read()
                if name in TOOLS:
                    rows = {
                        one: {
                            "also": " ".join(sorted(row.get("fields", ()))),
                            "bases": row["bases"],
                        }
                        for one, row in rows.items()
                    }
                for one, row in rows.items():
                    if also := ALSO.get(f"{name}.{one}"):
                        row["also"] += also
                yield name, {"release": found.version.partition("+")[0], "rows": rows}
                break


def names_in(table: Mapping[str, Any], rows: Rows, library: str, name: str) -> set[str]:
    """The names that a class takes, with those of its bases, of other libraries too."""
    row = rows.get(name, {})
    found = {*row.get("fields", ()), *row.get("also", "").split()}
    for base in row.get("bases", ()) if "call" not in row else ():
        root, _, own = base.partition(".")
        inner = rows if root == library else table.get(root, {}).get("rows", {})
        found |= names_in(table, inner, root, own)
    return found


def add_history(table: dict[str, Any], library: str, folder: Path) -> None:
    """Say until and since when the classes of a library have taken an argument."""
    part = table[library]
    part |= {"until": {}, "since": {}}
    last = Version(part["release"])
    releases = sorted((Version(p.name), p) for p in folder.iterdir() if (p / library).is_dir())
    read = [(v, Reader(library, p / library, TORCH).read()) for v, p in releases if v < last]
    for name in part["rows"]:
        newest = names_in(table, part["rows"], library, name)
        inherited = newest - {*part["rows"][name].get("fields", ())}
        past = [(v, names_in(table, rows, library, name)) for v, rows in read if name in rows]
        for (old, before), (new, after) in pairwise([*past, (last, newest)]):
            for word, release, names in (
                ("until", old, before - after - newest),
                ("since", new, (after - before) & newest),
            ):
                short = ".".join(map(str, release.release[:2]))
                kept = names & LOADING if name == "from_pretrained" else names - inherited
                if kept and follows(old, new):
                    part[word].setdefault(name, {}).update(dict.fromkeys(sorted(kept), short))


def follows(old: Version, new: Version) -> bool:
    """True if no release lies between two, but for those with another third number."""
    return new.release[:2] in {old.release[:2], (old.major, old.minor + 1), (old.major + 1, 0)}


def written(table: Mapping[str, Any]) -> str:
    """The text of the file: a line for each class and function."""
    parts = []
    for library, part in sorted(table.items()):
        lines = []
        for key, value in part.items():
            if isinstance(value, str):
                lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
                continue
            rows = [f"   {json.dumps(n)}: {json.dumps(r)}" for n, r in sorted(value.items())]
            lines.append(f"  {json.dumps(key)}: {{\n" + ",\n".join(rows) + "\n  }")
        parts.append(f" {json.dumps(library)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Write the file anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, action="append", default=[])
    parser.add_argument("--history", type=Path, action="append", default=[])
    options = parser.parse_args()
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    found = dict(read_table([*options.folder, *map(Path, sys.path)]))
    past = {n: {k: p[k] for k in ("until", "since") if k in p} for n, p in known.items()}
    table = known | {name: {**part, **past.get(name, {})} for name, part in found.items()}
    for folder in options.history:
        for library in {p.name for p in folder.glob("*/*") if p.name in table}:
            add_history(table, library, folder)
    FILE.write_text(written(table), encoding="utf-8")


if __name__ == "__main__":
    main()
