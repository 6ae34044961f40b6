"""The front as a picture of characters, for the end of a search and for `tuner show`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping

from tuner.core.units import GIB, printable
from tuner.report.front_figure import axes_of, points_of
from tuner.report.plot import memory_range_gib
from tuner.report.terminal.render import echo, width
from tuner.searches.view import Kind, View

HEIGHT = 16
MAX_WIDTH = 80
LEAST_POINTS = 3
"""Fewer points say no more than the table above them."""

_MARKS: Mapping[Kind, tuple[str, str]] = {  # how it is drawn, and what it is called
    Kind.BEST: ("*", "recommended"),
    Kind.FRONT: ("o", "front"),
    Kind.FITS: (".", "fits"),
    Kind.OUTSIDE: (",", "fits, excluded"),
    Kind.UNTRIED: (",", "predicted to fit"),
    Kind.TOO_LARGE: ("x", "does not fit"),
    Kind.FAILED: ("!", "failed"),
}
# What plotext draws its frame with, in the characters that every encoding has.
_ASCII = str.maketrans("─│┌┐└┘├┤┬┴┼╷╵╴╶", "-|+++++++++||--")


def print_plot(view: View) -> None:
    """Every trial as a character, with a legend; nothing where there is too little to see."""
    text = plot_text(view, columns=min(width(), MAX_WIDTH), is_ascii=not _can_draw())
    if text:
        echo(f"\n{text}")


def plot_text(view: View, *, columns: int, is_ascii: bool) -> str:
    """The picture, without colour or any control character; empty where there is too little."""
    import plotext  # 40 ms, where a front is shown

    across, up = axes_of(view)
    drawn = points_of(view)
    low, high = memory_range_gib(view) if across.objective.name == "device_bytes" else (None, None)
    shown = {
        points.kind: [
            (x, y) for x, y in zip(points.xs, points.ys, strict=True) if high is None or x <= high
        ]
        for points in drawn
    }
    if len({point for found in shown.values() for point in found}) < LEAST_POINTS:
        return ""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(columns, HEIGHT)
    limit = view.gpu.memory_bytes / GIB
    has_limit = high is not None and limit < high
    if high is not None:
        plotext.xlim(low, high)
    if has_limit:
        plotext.vline(limit)
    for kind, found in shown.items():  # the recommended one comes last, over all others
        if found:
            xs, ys = zip(*found, strict=True)
            plotext.scatter(xs, ys, marker=_MARKS[kind][0])
    lines = [line.rstrip() for line in plotext.uncolorize(plotext.build()).splitlines()]
    title = f"{up.title} over {across.title}, {view.drawn_source}"
    picture = "\n".join([textwrap.fill(title, columns), *lines])
    if is_ascii:
        picture = picture.translate(_ASCII)
    kinds = [kind for kind in _MARKS if shown.get(kind)]
    return f"{printable(picture)}\n{_legend(kinds, has_limit=has_limit)}"


def _legend(kinds: list[Kind], *, has_limit: bool) -> str:
    named = [" ".join(_MARKS[kind]) for kind in kinds]
    return "  ".join([*named, *(["| the GPU's memory"] if has_limit else [])])


def _can_draw() -> bool:
    """Whether stdout can show the characters of a frame."""
    try:
        "─│┌┐└┘┤┬".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
