"""Draws the ten rooms and the imports between them, as Mermaid, into docs/reference/developing.md.

python -m benchmarks.rooms
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/developing.md"
ROOMS = (
    "core", "space", "cost", "predict", "emulator", "program", "trial", "searches", "report", "app",
)  # fmt: skip
BLOCK = re.compile(r"```mermaid\n.*?```\n", re.DOTALL)


def flows() -> Counter[tuple[str, str]]:
    """The number of modules that import another room, by (importing room, imported room)."""
    found: Counter[tuple[str, str]] = Counter()
    for room in ROOMS:
        for path in (ROOT / "tuner" / room).rglob("*.py"):
            found.update((room, other) for other in _rooms_of(path) - {room})
    return found


def _rooms_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in nodes for alias in node.names]
    parts = [name.split(".") for name in names if name.startswith("tuner.")]
    return {part[1] for part in parts} & set(ROOMS)


def needed(edges: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """The edges that no longer path implies."""
    below = {room: {b for a, b in edges if a == room} for room in ROOMS}
    for room in ROOMS:  # each imports only rooms before it
        below[room] |= {far for near in below[room] for far in below[near]}
    return sorted((a, b) for a, b in edges if not any(b in below[c] for x, c in edges if x == a))


def block() -> str:
    """The part of the page that this script writes."""
    arrows = (f"  {above} --> {below}" for above, below in needed(set(flows())))
    return "\n".join(["```mermaid", "flowchart TD", *arrows, "```", ""])


def main() -> None:
    """Renew the picture."""
    PAGE.write_text(BLOCK.sub(lambda _: block(), PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
