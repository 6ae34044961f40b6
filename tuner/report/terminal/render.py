"""Fields and JSON, as the commands print them."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

import click

from tuner.core.units import GIB, MIB, printable

PIPE_WIDTH = 80
"""Columns of an output of unknown width: a CI log shows 80 without wrapping."""
MAX_FIELD_WIDTH = 100


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """A line of text, in which no name or message can make the terminal do anything."""
    stream = sys.stderr if err else sys.stdout
    # A live display shows the line above itself. click would write to the stream below it, and the
    # display would erase the line.
    above = stream if hasattr(stream, "rich_proxied_file") else None
    click.echo(printable(text), file=above, err=err, nl=nl)


_WHOLE = re.compile(r"(?<=: )(?:tuner|pip install|python) [^;(`]*[^;(`\s]|`[^`]+`\S*|\S+")
"""A word, or a command, which is there to be copied and stays on one line."""


def wrapped(text: str, columns: int) -> str:
    """The lines of `text`, broken between words and commands; what goes on is indented."""
    lines: list[str] = []
    for line in text.splitlines():
        start = line[: len(line) - len(line.lstrip())]
        below = start + ("    " if start else "  ")
        lines.append(start.removesuffix(" "))
        for word in _WHOLE.findall(line):
            if len(lines[-1]) + 1 + len(word) > columns and lines[-1].strip():
                lines.append(below + word)
            else:
                lines[-1] += (" " if lines[-1] else "") + word
    return "\n".join(lines)


def prose(text: str) -> str:
    """Text for stdout: a screen breaks it between words."""
    return wrapped(text, width()) if is_interactive(sys.stdout) else text


def say(text: str) -> None:
    """Print prose."""
    echo(prose(text))


def echo_error(text: str) -> None:
    """The answer of a command that failed, on stderr: a screen breaks it between words."""
    echo(wrapped(text, width()) if is_interactive(sys.stderr) else text, err=True)


def print_json(value: Any) -> None:
    """`value` on stdout as one JSON document."""
    click.echo(json.dumps(value, indent=2, allow_nan=False, default=str))


def width() -> int:
    """Columns to fill."""
    return shutil.get_terminal_size((PIPE_WIDTH, 24)).columns


def print_fields(
    pairs: Iterable[tuple[str, str]],
    *,
    err: bool = False,
    indent: int = 0,
    commands: Iterable[tuple[str, str]] = (),
) -> None:
    """Lines of label and value; long values go on below themselves. Empty values are left out.

    Commands follow, each on one line however long: they are there to be copied.
    """
    shown = [(label, value) for label, value in pairs if value]
    whole = [(label, line) for label, line in commands if line]
    column = indent + max((len(label) for label, _ in (*shown, *whole)), default=0) + 2
    for label, value in shown:
        lines = textwrap.wrap(
            value,
            max(20, min(width(), MAX_FIELD_WIDTH) - column),
            break_long_words=False,
            break_on_hyphens=False,
        )
        head = " " * indent + label
        for number, line in enumerate(lines):
            echo(f"{head if number == 0 else '':<{column}}{line}", err=err)
    for label, line in whole:
        echo(f"{' ' * indent + label:<{column}}{line}", err=err)


def is_interactive(stream: TextIO) -> bool:
    """True if `stream` is a screen on which a line can be drawn over, with a person before it.

    A CI may offer a terminal, and so does a notebook to a program that a cell starts with "!";
    neither draws over what was printed.
    """
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    is_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return not is_ci and not is_in_notebook()


def is_in_notebook() -> bool:
    """True in a kernel of Jupyter, and in a process that a cell starts."""
    return "JPY_PARENT_PID" in os.environ


def is_coloured(stream: TextIO) -> bool:
    """True if text on `stream` may be in colour."""
    return is_interactive(stream) and not os.environ.get("NO_COLOR")


def differing(
    names: Iterable[str], configurations: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """The names whose values differ between configurations, and those with one value."""
    found: tuple[list[str], list[str]] = ([], [])
    for name in names:
        found[len({each.get(name) for each in configurations}) == 1].append(name)
    return found


def size_text(size_bytes: int) -> str:
    """A size as an option takes it, to the byte: "40GiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return f"{size_bytes}B"


def count(number: float | None) -> str:
    """A whole number with thousands separators, or "?" when unknown."""
    return "?" if number is None else f"{number:,.0f}"
