"""A table must say the same at every width: text is wrapped and columns are left out, no more."""

import io
from collections import Counter

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult

from tuner.report.terminal.tables import _Sheet

WIDTHS = (60, 80, 200)

_render = _Sheet.__rich_console__


def checked(sheet: _Sheet, console: Console, options: ConsoleOptions) -> RenderResult:
    """Instead of `_Sheet.__rich_console__`: draws a table after looking at it in each width."""
    for width in WIDTHS:
        lines = printed(sheet, width)
        assert max(map(cell_len, lines)) <= width, "\n".join(lines)
        assert_whole(sheet, width)
    return _render(sheet, console, options)


def printed(sheet: _Sheet, width: int) -> list[str]:
    """The lines of a table in a terminal of `width` columns."""
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False, emoji=False)
    for part in _render(sheet, console, console.options):
        console.print(part, crop=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def assert_whole(sheet: _Sheet, width: int) -> None:
    """Each column is named as missing, or printed with every character, its numbers in one line."""
    text = "\n".join(printed(sheet, width))
    table, _, below = "".join(text.split()).partition("notshownatthiswidth:")
    missing = below.partition(";widen")[0].split(",") if below else []
    shown = [c for c in sheet._columns if not c.name or "".join(c.name.split()) not in missing]
    said = [text for column in shown for text in (column.name, *column.cells)]
    assert characters(table) == characters("".join(said)), text
    assert len(sheet._columns) - len(shown) == len(missing), text
    for number in (n for c in shown if c.is_number for n in c.cells if cell_len(n) <= 28):
        assert number in text, (number, text)


def characters(text: str) -> Counter[str]:
    """Every character with its number, but blanks and lines."""
    return Counter("".join(text.replace("─", "").split()))
