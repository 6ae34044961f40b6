"""The interactive figures of one knob each, as plain data for plotly.js.

Points carry only their index into the report's table of trials: the page writes the hover
text from that table, once, and as text. Colours of text and grid come from the page's theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from tuner.core.records import KnobValue
from tuner.core.units import GIB, printable, significant
from tuner.report.front_figure import DRAW_ORDER, SYMBOLS, by_kind, drawn_point
from tuner.report.plot import (
    COLORS,
    PLAIN_TICKS,
    memory_range_gib,
    plotly_data,
    plotly_text,
    throughput_range,
)
from tuner.report.table import value_text
from tuner.searches.facts import rounded
from tuner.searches.view import Kind, View

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_KNOB_POINTS = 800
"""Points of one small knob figure, and values of its line; of more an even sample is drawn."""
MAX_TICKS = 8
MAX_TICK_LENGTH = 20
FLAT_CHARACTERS = 40
"""Characters of tick labels that have room beside each other in a small figure."""


@dataclass(frozen=True, slots=True)
class KnobFigure:
    """Throughput and memory against one knob: the figure and what it shows, in words."""

    name: str
    summary: str
    figure: dict[str, Any]


def knob_figures(view: View) -> list[KnobFigure]:
    """One figure for each value of the configuration that varies over the trials."""
    memory = memory_range_gib(view)
    common = _Common(view, by_kind(view), memory, throughput_range(view, memory[1]))
    columns = zip(*(r.configuration.values_of(view.knobs) for r in view.records), strict=True)
    figures = []
    for name, column in zip(view.knobs, columns, strict=False):  # no column without a record
        if len({value for value in column if value is not None}) > 1:
            figures.append(_knob_figure(common, name, column))
    return figures


@dataclass(frozen=True, slots=True)
class _Common:
    """The scales and places that the figures of all knobs share."""

    view: View
    places: Mapping[Kind, Sequence[int]]
    memory_gib: tuple[float, float]
    samples_per_s: tuple[float, float]


def _knob_figure(common: _Common, name: str, column: Sequence[KnobValue | None]) -> KnobFigure:
    """The figure of a knob; `column` is its value in each trial, None where it has none."""
    from plotly.subplots import make_subplots

    view = common.view
    values = sorted({value for value in column if value is not None}, key=_value_order)
    slot = {value: index for index, value in enumerate(values)}
    slots = [None if value is None else slot[value] for value in column]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07)
    fastest = _best_by_value(common, slots)
    for kind in DRAW_ORDER:
        if kind is Kind.FRONT and fastest:  # over the crowd, under the front and the best
            _add_fastest_line(figure, fastest)
        _add_knob_points(figure, common, kind, slots)
    limit = (view.gpu.memory_bytes - view.margin_bytes) / GIB
    line = {"color": COLORS[Kind.TOO_LARGE], "width": 1.2, "dash": "dash"}
    figure.add_hline(y=limit, line=line, row=2, col=1)
    shown = _thinned(range(len(values)), MAX_TICKS)
    names = [_as_text(values[i]) for i in shown]
    is_long = max(map(len, names)) * len(names) > FLAT_CHARACTERS
    ticks = {"tickvals": shown, "ticktext": names, "tickangle": -35 if is_long else 0}
    figure.update_xaxes(range=[-0.6, len(values) - 0.4], zeroline=False, **ticks)
    # Long names stand aslant and end at their tick; without this the last one would be left out.
    figure.update_xaxes(automargin=True, ticklabeloverflow="allow", row=2, col=1)
    speeds = {"range": list(common.samples_per_s), **PLAIN_TICKS}
    figure.update_yaxes(title="samples/s", row=1, col=1, **speeds)
    figure.update_yaxes(range=list(common.memory_gib), title="GiB", row=2, col=1)
    margin = {"l": 52, "r": 8, "t": 6, "b": 30}
    figure.update_layout(template="none", margin=margin, hovermode="closest")
    return KnobFigure(name, _knob_summary(common, fastest, slots, values), plotly_data(figure))


def _add_knob_points(
    figure: Figure, common: _Common, kind: Kind, slots: Sequence[int | None]
) -> None:
    view = common.view
    indices = [i for i in common.places[kind] if slots[i] is not None]
    share = MAX_KNOB_POINTS * len(indices) // max(1, len(view.records))
    keep = indices if kind in (Kind.FRONT, Kind.BEST) else _thinned(indices, share)
    spread = 0.0 if kind is Kind.BEST else 0.5
    xs = [(slots[i] or 0) + spread * _jitter(i) for i in keep]
    points = [drawn_point(view.numbers[i]) for i in keep]
    symbol, size, opacity = SYMBOLS[kind]
    for row, coordinate in ((1, 1), (2, 0)):
        figure.add_scatter(
            x=xs,
            y=[p[coordinate] for p in points],
            mode="markers",
            customdata=keep,
            hovertemplate="%{text}<extra></extra>",
            marker={
                "symbol": symbol,
                "size": round(size * 0.65),
                "color": COLORS[kind],
                "opacity": opacity if kind in (Kind.FRONT, Kind.BEST) else opacity * 0.6,
                "line": {"color": COLORS[kind], "width": 1.2 * (kind is Kind.TOO_LARGE)},
            },
            showlegend=False,
            row=row,
            col=1,
        )


def _add_fastest_line(figure: Figure, fastest: Mapping[int, float]) -> None:
    shown = _thinned(list(fastest), MAX_KNOB_POINTS)
    speeds = [fastest[slot] for slot in shown]
    figure.add_scatter(
        x=shown,
        y=speeds,
        mode="lines+markers",
        line={"color": COLORS[Kind.FRONT], "width": 2},
        marker={"size": 5},
        text=[significant(speed) for speed in speeds],
        hovertemplate="fastest that fits: %{text} samples/s<extra></extra>",
        showlegend=False,
        row=1,
        col=1,
    )


def _knob_summary(
    common: _Common,
    fastest: Mapping[int, float],
    slots: Sequence[int | None],
    values: Sequence[KnobValue],
) -> str:
    """The figure in words; of equally fast values, the starred one."""
    if not fastest:
        return "Nothing fits at any value."
    speeds = {slot: significant(speed) for slot, speed in fastest.items()}
    top = max(fastest, key=lambda slot: fastest[slot])
    low = min(fastest, key=lambda slot: fastest[slot])
    star = _star(common, slots)
    if star is not None and star[1] == speeds[top]:
        top = star[0]
    text = f"Fastest that fits: {speeds[top]} samples/s at {value_text(values[top])}"
    if star is not None and star != (top, speeds[top]):
        text += f"; recommended: {star[1]} at {value_text(values[star[0]])}"
    if speeds[low] != speeds[top]:
        text += f"; {speeds[low]} at {value_text(values[low])}"
    elif len(fastest) > 1:
        text += ", and at every other value that fits"
    never = [value_text(v) for i, v in enumerate(values) if i not in fastest]
    if never:
        shown = ", ".join(never) if len(never) <= 4 else f"{len(never)} other values"
        text += f". Nothing fits at {shown}"
    return text + "."


def _star(common: _Common, slots: Sequence[int | None]) -> tuple[int, str] | None:
    """The value of the recommended configuration, by its position, and its throughput as shown."""
    for place in common.places[Kind.BEST]:
        slot, numbers = slots[place], common.view.numbers[place]
        if slot is not None and numbers:
            return slot, significant(numbers[1])
    return None


def _best_by_value(common: _Common, slots: Sequence[int | None]) -> dict[int, float]:
    """The highest throughput among fitting trials at each value, by the value's position."""
    fastest: dict[int, float] = {}
    for place in chain.from_iterable(common.places[k] for k in (Kind.BEST, Kind.FRONT, Kind.FITS)):
        index, numbers = slots[place], common.view.numbers[place]
        if index is not None and numbers:
            fastest[index] = max(numbers[1], fastest.get(index, 0.0))
    return {index: rounded(fastest[index]) for index in sorted(fastest)}


def _value_order(value: KnobValue) -> tuple[bool, float, str]:
    """Numbers by size, then words by letter."""
    if isinstance(value, int | float):
        return (False, float(value), "")
    return (True, 0.0, value_text(value))


def _as_text(value: KnobValue) -> str:
    """A value for a label, cut to fit."""
    text = printable(value_text(value))
    return plotly_text(text if len(text) <= MAX_TICK_LENGTH else text[: MAX_TICK_LENGTH - 1] + "…")


def _jitter(index: int) -> float:
    """A shift in [-0.5, 0.5) that keeps equal points apart, the same in every report."""
    return round(index * 0.6180339887 % 1 - 0.5, 3)  # golden ratio: evenly spread


def _thinned(indices: Sequence[int], count: int) -> list[int]:
    """At most about `count` of `indices`, evenly spaced, the first one included."""
    step = max(1, -(-len(indices) // max(1, count)))
    return list(indices[::step])
