"""The interactive figures of the report, as plain data for plotly.js.

Points carry only their index into the report's table of trials: the page writes the hover
text from that table, once, and as text. Colours of text and grid come from the page's theme.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from tuner.core.records import KnobValue
from tuner.core.units import GIB, printable, significant
from tuner.report.plot import (
    COLORS,
    EMULATED_COLOR,
    UNDECIDED_LABEL,
    emulated_among_others,
    is_limit_far,
    labels,
    memory_range_gib,
    throughput_range,
)
from tuner.report.prediction_error import QUANTITIES, pairs
from tuner.report.table import value_text
from tuner.searches.view import Kind, View, numbers_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_KNOB_POINTS = 800
"""Points of one small knob figure, and values of its line; of more an even sample is drawn."""
_PLAIN_TICKS = {"exponentformat": "none", "separatethousands": True}
"""0.0005 and 12,000, where plotly.js would write 500μ and 12k."""
MAX_TICKS = 8
MAX_TICK_LENGTH = 20
FLAT_CHARACTERS = 40
"""Characters of tick labels that have room beside each other in a small figure."""

_DRAW_ORDER = (
    Kind.TOO_LARGE,
    Kind.FAILED,
    Kind.UNTRIED,
    Kind.OUTSIDE,
    Kind.FITS,
    Kind.FRONT,
    Kind.BEST,
)
_SYMBOLS: Mapping[Kind, tuple[str, int, float]] = {  # symbol, size, opacity
    Kind.TOO_LARGE: ("x-thin-open", 7, 0.8),
    Kind.FAILED: ("diamond", 7, 0.75),
    Kind.OUTSIDE: ("circle", 6, 0.45),
    Kind.UNTRIED: ("circle", 6, 0.6),
    Kind.FITS: ("circle", 8, 0.75),
    Kind.FRONT: ("circle", 11, 1.0),
    Kind.BEST: ("star", 19, 1.0),
}


@dataclass(frozen=True, slots=True)
class KnobFigure:
    """Throughput and memory against one knob: the figure and what it shows, in words."""

    name: str
    summary: str
    figure: dict[str, Any]


def front_figure(view: View) -> dict[str, Any]:
    """Throughput against peak device memory: every trial, the front and the GPU's memory."""
    import plotly.graph_objects as go  # only where a report is written

    figure = go.Figure()
    front = [_point(numbers_of(r)) for r in view.front]
    if front:
        end = (view.gpu.memory_bytes - view.margin_bytes) / GIB
        figure.add_scatter(
            x=[*(p[0] for p in front), end],
            y=[*(p[1] for p in front), front[-1][1]],
            mode="lines",
            line={"shape": "hv", "color": COLORS[Kind.FRONT], "width": 2.5},
            hoverinfo="skip",
            showlegend=False,
        )
    for kind, indices in _by_kind(view).items():
        if indices:
            _add_points(figure, view, kind, indices)
    _add_rings(figure, view)
    _add_undecided(figure, view)
    _add_limits(figure, view)
    memory = memory_range_gib(view)
    figure.update_layout(
        template="none",
        xaxis={
            "title": {"text": f"peak device memory ({view.drawn_source}), GiB"},
            "range": list(memory),
        },
        yaxis={
            "title": {"text": f"throughput ({view.drawn_source}), samples/s"},
            "range": list(throughput_range(view, memory[1])),
            **_PLAIN_TICKS,
        },
        legend={
            "orientation": "h",
            "y": 1.02,
            "yanchor": "bottom",
            "x": 0,
            "traceorder": "reversed",
        },
        margin={"l": 64, "r": 16, "t": 40, "b": 52},
        hovermode="closest",
        dragmode="zoom",
    )
    return _as_data(figure)


def prediction_error_figure(view: View) -> dict[str, Any] | None:
    """Predicted against measured memory and step time; None unless a trial has both.

    One panel each with the line of a perfect prediction. Step times span decades, so both of their
    axes are logarithmic.
    """
    from plotly.subplots import make_subplots  # only where a report is written

    index_of = {record.trial_id: index for index, record in enumerate(view.records)}
    found = pairs(view.records)
    if not found:
        return None
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    memory, _, step = QUANTITIES
    panels = ((memory, GIB, "GiB", "linear"), (step, 1.0, "s", "log"))
    for column, (quantity, unit, name, scale) in enumerate(panels, start=1):
        xs = [quantity.value(pair.measured) / unit for pair in found]
        ys = [quantity.value(pair.predicted) / unit for pair in found]
        ends = [min(xs + ys) / 1.1, max(xs + ys) * 1.1]
        place = {"row": 1, "col": column}
        line = {"color": COLORS[Kind.OUTSIDE], "width": 1.2, "dash": "dash"}
        figure.add_scatter(
            x=ends, y=ends, mode="lines", line=line, hoverinfo="skip", showlegend=False, **place
        )
        figure.add_scatter(
            x=[_rounded(x) for x in xs],
            y=[_rounded(y) for y in ys],
            mode="markers",
            customdata=[index_of[pair.record.trial_id] for pair in found],
            meta=name,
            hovertemplate="predicted %{y:.4g} %{meta}, measured %{x:.4g} %{meta}<br>"
            "%{text}<extra></extra>",
            marker={"size": 8, "color": COLORS[Kind.FITS], "opacity": 0.75},
            showlegend=False,
            **place,
        )
        title = f"{quantity.label}, {name}"
        ticks = {**_PLAIN_TICKS, **(_log_ticks(*ends) if scale == "log" else {})}
        figure.update_xaxes(title=f"measured {title}", type=scale, **ticks, **place)
        figure.update_yaxes(title=f"predicted {title}", type=scale, **ticks, **place)
    margin = {"l": 64, "r": 16, "t": 10, "b": 52}
    figure.update_layout(template="none", margin=margin, hovermode="closest")
    return _as_data(figure)


def _log_ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks at 1, 2 and 5 of each decade: plotly.js would write the 2 of 0.2 as "2"."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
    values = [step for step in steps if low <= step <= high]
    return {"tickvals": values, "ticktext": [f"{value:,.6g}" for value in values]}


def knob_figures(view: View) -> list[KnobFigure]:
    """One figure for each value of the configuration that varies over the trials."""
    memory = memory_range_gib(view)
    common = _Common(view, _by_kind(view), memory, throughput_range(view, memory[1]))
    columns = zip(*(r.configuration.values_of(view.knobs) for r in view.records), strict=True)
    figures = []
    for name, column in zip(view.knobs, columns, strict=False):  # no column without a record
        if len({value for value in column if value is not None}) > 1:
            figures.append(_knob_figure(common, name, column))
    return figures


@dataclass(frozen=True, slots=True)
class _Common:
    """What the figures of all knobs share."""

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
    for kind in _DRAW_ORDER:
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
    speeds = {"range": list(common.samples_per_s), **_PLAIN_TICKS}
    figure.update_yaxes(title="samples/s", row=1, col=1, **speeds)
    figure.update_yaxes(range=list(common.memory_gib), title="GiB", row=2, col=1)
    margin = {"l": 52, "r": 8, "t": 6, "b": 30}
    figure.update_layout(template="none", margin=margin, hovermode="closest")
    return KnobFigure(name, _knob_summary(common, fastest, slots, values), _as_data(figure))


def _add_knob_points(
    figure: Figure, common: _Common, kind: Kind, slots: Sequence[int | None]
) -> None:
    view = common.view
    indices = [i for i in common.places[kind] if slots[i] is not None]
    share = MAX_KNOB_POINTS * len(indices) // max(1, len(view.records))
    keep = indices if kind in (Kind.FRONT, Kind.BEST) else _thinned(indices, share)
    spread = 0.0 if kind is Kind.BEST else 0.5
    xs = [(slots[i] or 0) + spread * _jitter(i) for i in keep]
    points = [_point(view.numbers[i]) for i in keep]
    symbol, size, opacity = _SYMBOLS[kind]
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
    """What the figure shows, in words; of values that are as fast, the starred one is named."""
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
    return {index: _rounded(fastest[index]) for index in sorted(fastest)}


def _add_points(figure: Figure, view: View, kind: Kind, indices: Sequence[int]) -> None:
    symbol, size, opacity = _SYMBOLS[kind]
    points = [_point(view.numbers[i]) for i in indices]
    count = "" if kind is Kind.BEST else f" ({len(view.front if kind is Kind.FRONT else indices)})"
    marker: dict[str, Any] = {
        "symbol": symbol,
        "size": size * (0.75 if len(indices) > 500 else 1),
        "color": COLORS[kind],
        "opacity": opacity * (0.7 if len(indices) > 500 else 1),
    }
    if kind in (Kind.BEST, Kind.FRONT):
        marker["line"] = {"color": "#ffffff", "width": 1}
    elif kind is Kind.TOO_LARGE:
        marker["line"] = {"color": COLORS[kind], "width": 1.6}
    figure.add_scatter(
        x=[p[0] for p in points],
        y=[p[1] for p in points],
        mode="markers",
        customdata=list(indices),
        hovertemplate="%{text}<extra></extra>",
        marker=marker,
        name=labels(view)[kind] + count,
    )


def _add_rings(figure: Figure, view: View) -> None:
    """A ring around what was emulated, where there are numbers of other kinds."""
    found = [i for i in emulated_among_others(view) if view.numbers[i]]
    if not found:
        return
    points = [_point(view.numbers[i]) for i in found]
    figure.add_scatter(
        x=[p[0] for p in points],
        y=[p[1] for p in points],
        mode="markers",
        hoverinfo="skip",
        marker={"symbol": "circle-open", "size": 14, "color": EMULATED_COLOR},
        name=f"emulated ({len(found)})",
    )


def _add_undecided(figure: Figure, view: View) -> None:
    """A white centre in points of the front whose order is not certain."""
    points = [_point(numbers_of(record)) for record in view.undecided]
    if not points:
        return
    figure.add_scatter(
        x=[p[0] for p in points],
        y=[p[1] for p in points],
        mode="markers",
        hoverinfo="skip",
        marker={
            "size": 5,
            "color": "#ffffff",
            "line": {"color": COLORS[Kind.FRONT], "width": 0.6},
        },
        name=f"{UNDECIDED_LABEL} ({len(points)})",
    )


def _add_limits(figure: Figure, view: View) -> None:
    if is_limit_far(view):
        return
    limit, margin = view.gpu.memory_bytes / GIB, view.margin_bytes / GIB
    end = memory_range_gib(view)[1]
    red, amber = COLORS[Kind.TOO_LARGE], COLORS[Kind.BEST]
    area = {"layer": "below", "line_width": 0}
    figure.add_vrect(x0=limit, x1=max(end, limit) * 4, fillcolor=red, opacity=0.08, **area)
    figure.add_vline(x=limit, line={"color": red, "width": 2})
    label = {"yref": "paper", "y": 0.015, "yanchor": "bottom", "textangle": -90}
    label = {**label, "showarrow": False, "font": {"size": 12}}
    text = f"memory {limit:.2f} GiB"
    figure.add_annotation(x=limit, xanchor="left", text=text, name="limit", **label)
    if margin > 0:
        figure.add_vrect(x0=limit - margin, x1=limit, fillcolor=amber, opacity=0.13, **area)
        line = {"color": amber, "width": 1.5, "dash": "dash"}
        figure.add_vline(x=limit - margin, line=line)
        text = f"with {margin:.2f} GiB margin"
        figure.add_annotation(x=limit - margin, xanchor="right", text=text, **label)


def _by_kind(view: View) -> dict[Kind, list[int]]:
    """The places of the trials with numbers by how they are drawn, in the order of drawing."""
    found: dict[Kind, list[int]] = {kind: [] for kind in _DRAW_ORDER}
    for place, (numbers, kind) in enumerate(zip(view.numbers, view.kinds, strict=True)):
        if numbers:
            found[kind].append(place)
    return found


def _point(numbers: tuple[int, float] | None) -> tuple[float, float]:
    """Memory in GiB and throughput in samples/s, no finer than a screen can show."""
    size, speed = numbers or (0, 0.0)
    return round(size / GIB, 3), _rounded(speed)


def _rounded(speed: float) -> float:
    return float(f"{speed:.6g}")


def _value_order(value: KnobValue) -> tuple[bool, float, str]:
    """Numbers by size, then words by letter."""
    if isinstance(value, int | float):
        return (False, float(value), "")
    return (True, 0.0, value_text(value))


def _as_text(value: KnobValue) -> str:
    """A value for a label, cut to fit, in which plotly.js would read tags and $formulas$."""
    text = printable(value_text(value))
    short = text if len(text) <= MAX_TICK_LENGTH else text[: MAX_TICK_LENGTH - 1] + "…"
    return html.escape(short).replace("$", "&#36;")


def _jitter(index: int) -> float:
    """A shift in [-0.5, 0.5) that keeps equal points apart, the same in every report."""
    return round(index * 0.6180339887 % 1 - 0.5, 3)  # golden ratio: evenly spread


def _thinned(indices: Sequence[int], count: int) -> list[int]:
    """At most about `count` of `indices`, evenly spaced, the first one included."""
    step = max(1, -(-len(indices) // max(1, count)))
    return list(indices[::step])


def _as_data(figure: Figure) -> dict[str, Any]:
    """`data` and `layout` as JSON types."""
    data: dict[str, Any] = json.loads(figure.to_json())
    return {"data": data["data"], "layout": data["layout"]}
