"""Messages that the documentation quotes are those that the program has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUOTED = re.compile(r"`([^`]+)`")
OF_THE_SYSTEM = "No space left on device"


def texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a module; what an f-string fills in is a line end."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "\n" for part in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in inside:
            yield str(node.value)


@pytest.fixture(scope="module")
def program() -> str:
    found = (texts(ast.parse(path.read_text("utf-8"))) for path in (ROOT / "tuner").rglob("*.py"))
    return "\n".join(text for module in found for text in module)


def quoted(page: str) -> list[str]:
    """What stands quoted in the first column of the page's tables, sentences only."""
    rows = [line for line in (ROOT / page).read_text("utf-8").splitlines() if line[:2] == "| "]
    cells = [row.split("|")[1] for row in rows]
    spans = [span for cell in cells for span in QUOTED.findall(cell)]
    return [s for s in spans if s.count(" ") > 2 and not s.startswith("tuner ")]


def test_operations_quotes_what_is_said(program):
    found = quoted("docs/reference/failures.md")
    assert len(found) >= 12
    for message in found:
        parts = re.split(r"'?\.\.\.'?", message.replace(OF_THE_SYSTEM, ""))
        for part in filter(None, (p.strip(" :,") for p in parts)):
            text = part.replace("first 3 trials", "first \n trials")
            assert text in program, f"{message!r}: nothing says {part!r}"
