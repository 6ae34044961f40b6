"""The small figure of the parameters: the fastest configuration that fits, at each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.core.records import KnobValue
from tuner.core.units import printable, significant
from tuner.report.plot import COLORS, PLAIN_TICKS, plotly_data, plotly_text
from tuner.report.table import value_text
from tuner.searches.facts import rounded
from tuner.searches.view import Kind, View

MAX_LABEL_LENGTH = 20
MAX_POINTS = 60
"""Points of a parameter; of more values an even sample is drawn."""
ROW_PX, AXIS_PX = 44, 64
LABEL_SHARE = 0.011
"""The width of a character of a label, as a share of the figure's."""

_FITTING = (Kind.BEST, Kind.FRONT, Kind.FITS)


@dataclass(frozen=True, slots=True)
class _Point:
    """The fastest configurations that fit with these values of a parameter."""

    samples_per_s: float
    values: tuple[str, ...]
    is_recommended: bool

    @property
    def label(self) -> str:
        """The values, cut to fit."""
        text = printable(", ".join(self.values))
        return text if len(text) <= MAX_LABEL_LENGTH else text[: MAX_LABEL_LENGTH - 1] + "…"


def knobs_figure(view: View) -> dict[str, Any] | None:
    """A row of points for each parameter with two values that fit; None without one."""
    columns = zip(*(r.configuration.values_of(view.knobs) for r in view.records), strict=True)
    rows: dict[str, list[_Point]] = {}
    for name, column in zip(view.knobs, columns, strict=False):  # no column without a record
        points = _points(view, name, column)
        if sum(len(point.values) for point in points) > 1:
            rows[name] = points
    return _figure(rows) if rows else None


def _points(view: View, name: str, column: Sequence[KnobValue | None]) -> list[_Point]:
    """The points of a parameter by throughput; values that are equally fast share one."""
    fastest: dict[KnobValue, float] = {}
    for value, numbers, kind in zip(column, view.numbers, view.kinds, strict=True):
        if value is not None and numbers and kind in _FITTING:
            fastest[value] = max(numbers[1], fastest.get(value, 0.0))
    alike: dict[str, list[KnobValue]] = {}
    words = {value: isinstance(value, str | tuple) for value in fastest}  # behind all numbers
    for value in sorted(fastest, key=lambda v: (words[v], value_text(v) if words[v] else v)):
        alike.setdefault(significant(fastest[value]), []).append(value)
    best = view.best.configuration.get(name) if view.best else None
    found = [
        _Point(rounded(fastest[values[0]]), tuple(map(value_text, values)), best in values)
        for values in alike.values()
    ]
    step = -(-len(found) // MAX_POINTS)
    return sorted(found, key=lambda point: point.samples_per_s)[::-step][::-1] if found else []


def _figure(rows: Mapping[str, Sequence[_Point]]) -> dict[str, Any]:
    import plotly.graph_objects as go  # only where a report is written

    speeds = [point.samples_per_s for points in rows.values() for point in points]
    low, high = min(speeds), max(speeds)
    pad = 0.06 * (high - low) or 0.06 * high
    figure = go.Figure()
    for number, points in enumerate(rows.values()):
        labels = _labels(points, high - low + 2 * pad)
        figure.add_scatter(
            x=[point.samples_per_s for point in points],
            y=[number] * len(points),
            mode="lines+markers+text",
            text=[plotly_text(text) for text, _ in labels],
            textposition=[side for _, side in labels],
            textfont={"size": 11},
            line={"color": COLORS[Kind.OUTSIDE], "width": 1},
            marker={
                "symbol": ["star" if p.is_recommended else "circle" for p in points],
                "size": [13 if p.is_recommended else 8 for p in points],
                "color": [COLORS[Kind.BEST if p.is_recommended else Kind.FRONT] for p in points],
            },
            hovertext=[plotly_text(", ".join(point.values)) for point in points],
            hovertemplate="%{hovertext}: %{x} samples/s<extra></extra>",
            cliponaxis=False,  # a label may end beyond the last tick
            showlegend=False,
        )
    names = [plotly_text(name) for name in rows]
    figure.update_layout(
        template="none",
        height=ROW_PX * len(rows) + AXIS_PX,
        xaxis={
            "title": {"text": "fastest that fits, samples/s"},
            "range": [low - pad, high + pad],
            "zeroline": False,
            **PLAIN_TICKS,
        },
        yaxis={
            "tickvals": list(range(len(rows))),
            "ticktext": names,
            "range": [len(rows) - 0.4, -0.6],
            "automargin": True,
            "zeroline": False,
        },
        margin={"l": 8, "r": 64, "t": 4, "b": 48},
        hovermode="closest",
    )
    return plotly_data(figure)


def _labels(points: Sequence[_Point], width: float) -> list[tuple[str, str]]:
    """A label and its side of each point; "" where both sides have no room left."""
    ends = {"top center": float("-inf"), "bottom center": float("-inf")}
    found = []
    for point in points:
        half = LABEL_SHARE * width * len(point.label) / 2
        start, side = min((end, side) for side, end in ends.items())
        if point.samples_per_s - half < start:
            found.append(("", side))
        else:
            ends[side] = point.samples_per_s + half
            found.append((point.label, side))
    return found
