"""How the commands print tables. Colour only in a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from tuner.terminal.render import PIPE_WIDTH, is_interactive
from tuner.text import printable


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would end with the code that means "nothing fits".
        raise BrokenPipeError


class _Table(Table):
    def add_row(self, *cells: Any, **options: Any) -> None:
        shown = (printable(cell) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*shown, **options)


def console(*, err: bool = False) -> Console:
    """A console for tables, with all text taken literally; plain where nobody watches."""
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
