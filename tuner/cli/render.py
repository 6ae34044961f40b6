"""How the commands print: fields, tables and JSON. Colour only in a terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO

import click

from tuner.text import printable
from tuner.units import GIB, MIB

if TYPE_CHECKING:  # 60 ms that are spent only where a table is drawn
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 80
"""Columns where nobody says how wide the output is: a log of a CI shows 80 without wrapping."""
MAX_FIELD_WIDTH = 100


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """A line of text, in which no name or message can make the terminal do anything."""
    click.echo(printable(text), err=err, nl=nl)


def print_json(value: Any) -> None:
    """`value` on stdout as one JSON document."""
    click.echo(json.dumps(value, indent=2, allow_nan=False, default=str))


def width() -> int:
    """Columns to fill."""
    return shutil.get_terminal_size((PIPE_WIDTH, 24)).columns


def print_fields(pairs: Iterable[tuple[str, str]], *, err: bool = False, indent: int = 0) -> None:
    """Lines of label and value; long values go on below themselves. Empty values are left out."""
    shown = [(label, value) for label, value in pairs if value]
    column = indent + max((len(label) for label, _ in shown), default=0) + 2
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


def is_interactive(stream: TextIO) -> bool:
    """Whether `stream` is a screen on which a line can be drawn over, with a person before it.

    A CI may offer a terminal, and so does a notebook to a program that a cell starts with "!";
    neither draws over what was printed.
    """
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    is_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return not is_ci and "JPY_PARENT_PID" not in os.environ  # set by Jupyter for its kernels


def console(*, err: bool = False) -> Console:
    """A console for tables, with all text taken literally; plain where nobody watches."""
    from rich.console import Console  # 60 ms

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            # rich would end with the code that means "nothing fits".
            raise BrokenPipeError

    stream = sys.stderr if err else sys.stdout
    columns = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    styled = is_interactive(stream) and not os.environ.get("NO_COLOR")
    return _Console(
        stderr=err,
        markup=False,
        highlight=False,
        emoji=False,
        width=columns,
        force_terminal=is_interactive(stream),
        force_jupyter=False,  # a kernel's stdout takes text as well, and text can be copied
        color_system="auto" if styled else None,
    )


def table(columns: Sequence[str], *, right: Sequence[str] = ()) -> Table:
    """An empty table; the columns in `right` hold numbers. Cells are shown as `echo` shows text."""
    from rich import box  # with the console
    from rich.table import Table

    class _Table(Table):
        def add_row(self, *cells: Any, **options: Any) -> None:
            shown = (printable(cell) if isinstance(cell, str) else cell for cell in cells)
            super().add_row(*shown, **options)

    result = _Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in columns:
        number = name in right
        # Words that are longer than a column go on below: settings are there to be copied.
        justify: Literal["right", "left"] = "right" if number else "left"
        result.add_column(name, justify=justify, no_wrap=number, overflow="fold")
    return result


def print_wider(wide: Table, narrow: Table) -> None:
    """The table `wide` on stdout where the screen has room for it, else `narrow`."""
    out = console()
    needed = out.measure(wide, options=out.options.update(width=10_000)).maximum
    out.print(wide if needed <= out.width else narrow)


def print_rows(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """A whole table on stdout."""
    drawn = table(columns, right=right)
    for row in rows:
        drawn.add_row(*row)
        # What stands in the first column is there to be copied, and is never cut.
        drawn.columns[0].min_width = max(drawn.columns[0].min_width or 0, len(row[0]))
    console().print(drawn)


def settings_text(values: Mapping[str, Any], names: Iterable[str] | None = None) -> str:
    """`micro_batch=4 precision=nf4`: what can be typed after --set."""
    from tuner.expressions import show  # not needed to print a help text

    chosen = values if names is None else names
    return " ".join(f"{n}={show(values[n])}" for n in chosen if n in values)


def size_text(size_bytes: int) -> str:
    """A size as an option takes it, to the byte: "40GiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return f"{size_bytes}B"


def count(number: float | None) -> str:
    """A whole number with thousands separators, or "?" when unknown."""
    return "?" if number is None else f"{number:,.0f}"
