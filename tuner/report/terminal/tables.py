"""Tables of plain text. Colour only in a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from tuner.core.expressions import settings_text
from tuner.core.units import printable
from tuner.report.terminal.render import PIPE_WIDTH, is_coloured, is_interactive

if TYPE_CHECKING:  # loaded where a table is printed
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

_GAP = 3
"""Blanks between two columns; one less in a table that has to be wrapped."""
_LONGEST_WORD = 28
"""Words of a text up to this width are never broken over two lines."""
_NARROWEST_TEXT = 16
"""A column of text is dropped rather than made narrower than this."""


@dataclass(eq=False, slots=True)
class _Column:
    name: str
    is_number: bool
    cells: list[str] = field(default_factory=list)

    @property
    def natural(self) -> int:
        """Width at which no cell is wrapped."""
        return max(map(cell_len, [self.name, *(x for c in self.cells for x in c.split("\n"))]))

    @property
    def least(self) -> int:
        """Smallest width that is readable: no number is wrapped, and no word but a long one."""
        whole = [text for text in self.cells if self.is_number and cell_len(text) <= _LONGEST_WORD]
        words = [word for text in (self.name, *self.cells) for word in text.split()]
        longest = max(map(cell_len, [*whole, *words]), default=0)
        narrowest = 0 if self.is_number else min(self.natural, _NARROWEST_TEXT)
        return max(min(longest, _LONGEST_WORD), narrowest)


class _Sheet:
    """A table of plain text that fits any width without losing a character of a cell.

    Text is wrapped. Where that is not enough, whole columns are left out, and a line below the
    table names them: first the columns in `drop`, in that order, then others from the right. The
    first column always stays, and so do columns without a name.
    """

    def __init__(
        self, columns: Sequence[str], *, right: Sequence[str] = (), drop: Sequence[str] = ()
    ) -> None:
        self._columns = [_Column(printable(name), name in right) for name in columns]
        others = [column for column in self._columns if column.name not in drop]
        dropped = [column for name in drop for column in self._columns if column.name == name]
        self._by_worth = [*others, *reversed(dropped)]

    def add_row(self, *cells: str) -> None:
        for column, cell in zip(self._columns, cells, strict=True):
            column.cells.append(printable(cell))

    @property
    def natural_width(self) -> int:
        """Width at which nothing is wrapped."""
        return _width([column.natural for column in self._columns], _GAP)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table as wide as it may be, and the names of columns without room."""
        from rich.text import Text

        chosen = [c for c in self._columns if not c.name or c is self._columns[0]]
        for column in self._by_worth:
            least = [each.least for each in (*chosen, column)]
            if column not in chosen and _width(least, _GAP - 1) <= options.max_width:
                chosen.append(column)
        shown = [column for column in self._columns if column in chosen]
        yield _drawn(shown, options.max_width)
        if dropped := ", ".join(c.name for c in self._columns if c not in chosen):
            yield Text(f"not shown at this width: {dropped}; widen the terminal or use --json")


def console(*, err: bool = False) -> Console:
    """A console for tables, with all text taken literally; plain outside a terminal."""
    from rich.console import Console

    class _Unended(Console):
        def on_broken_pipe(self) -> None:
            # rich would end with the code that means "nothing fits".
            raise BrokenPipeError

    stream = sys.stderr if err else sys.stdout
    columns = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return _Unended(
        stderr=err,
        markup=False,
        highlight=False,
        emoji=False,
        width=columns,
        force_terminal=is_interactive(stream),
        force_jupyter=False,  # a kernel's stdout takes text as well, and text can be copied
        color_system="auto" if is_coloured(stream) else None,
    )


def print_settings(
    columns: Sequence[str],
    rows: Iterable[tuple[Sequence[str], Mapping[str, Any]]],
    names: Sequence[str],
    *,
    right: Sequence[str],
    drop: Sequence[str],
    wide_only: Sequence[str] = (),
) -> None:
    """A table of cells, and of the values that each configuration has for `names`.

    Where the screen is wide enough, each name is a column. Elsewhere all settings are in one, and
    the columns in `wide_only` are left out.
    """
    kept = [number for number, name in enumerate(columns) if name not in wide_only]
    wide = _Sheet([*columns, *names], right=right)
    narrow = _Sheet([*(columns[i] for i in kept), "settings"], right=right, drop=drop)
    for cells, values in rows:
        each = (settings_text(values, [name]).partition("=")[2] for name in names)
        wide.add_row(*cells, *each)
        narrow.add_row(*(cells[i] for i in kept), settings_text(values, names))
    screen = console()
    screen.print(wide if wide.natural_width <= screen.width else narrow, crop=False)


def print_rows(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> None:
    """A whole table on stdout; see `_Sheet`."""
    sheet = _Sheet(columns, right=right, drop=drop)
    for row in rows:
        sheet.add_row(*row)
    console().print(sheet, crop=False)


def _width(columns: Sequence[int], gap: int) -> int:
    return sum(columns) + gap * (len(columns) - 1)


def _drawn(columns: Sequence[_Column], width: int) -> Table:
    """A table of these columns, in which text takes the room that numbers leave."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    is_wrapped = _width([column.natural for column in columns], _GAP) > width
    gap = _GAP - is_wrapped
    widths = _widths(columns, width, gap)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, gap - 2),  # and one blank that the box draws
        pad_edge=False,
        show_edge=False,
        header_style="bold",
        width=_width(widths, gap),
    )
    for column, each in zip(columns, widths, strict=True):
        table.add_column(
            Text(column.name),
            justify="right" if column.is_number else "left",
            width=each,
            overflow="fold",  # a longer word goes on below: settings are there to be copied
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def _widths(columns: Sequence[_Column], width: int, gap: int) -> list[int]:
    """The width of each column: the least, and the rest for those that need little more first."""
    found = [column.least for column in columns]
    room = max(0, width - _width(found, gap))
    needed = {i: c.natural - found[i] for i, c in enumerate(columns) if c.natural > found[i]}
    for i in sorted(needed, key=needed.__getitem__):
        found[i] += (more := min(needed[i], room // len(needed)))
        room -= more
        del needed[i]
    return found
