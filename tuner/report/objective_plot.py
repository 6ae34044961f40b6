"""The front over other objectives than throughput and memory: as a picture, and for the report."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

from tuner.core.records import TrialRecord
from tuner.core.units import GIB
from tuner.report.plot import COLORS, labels
from tuner.searches.front import DEVICE_MEMORY, Objective
from tuner.searches.view import Kind, View

_ORDER = (Kind.TOO_LARGE, Kind.FAILED, Kind.UNTRIED, Kind.OUTSIDE, Kind.FITS, Kind.FRONT, Kind.BEST)


@dataclass(frozen=True, slots=True)
class PlotAxis:
    """One objective with its title; sizes are drawn in GiB."""

    objective: Objective
    title: str
    unit: float = 1.0

    def at(self, record: TrialRecord) -> float | None:
        """Where a trial lies; None where it has no such number."""
        value = self.objective.value(record)
        return None if value is None else value / self.unit


@dataclass(frozen=True, slots=True)
class Points:
    """The trials of one kind that have both numbers, by their place in the view's records."""

    kind: Kind
    indices: list[int]
    xs: list[float]
    ys: list[float]


def axes_of(view: View) -> tuple[PlotAxis, PlotAxis]:
    """The second objective and the first; memory where there is only one."""
    first, *more = view.objectives
    second = more[0] if more else DEVICE_MEMORY
    return _axis(second), _axis(first)


def _axis(objective: Objective) -> PlotAxis:
    if objective.name.endswith("_bytes"):
        return PlotAxis(objective, objective.label.replace("(bytes)", "(GiB)"), GIB)
    return PlotAxis(objective, objective.label)


def points_of(view: View) -> list[Points]:
    """All that can be drawn, in the order of drawing."""
    across, up = axes_of(view)
    found = []
    for kind in _ORDER:
        drawn = [
            (index, x, y)
            for index, record in enumerate(view.records)
            if view.kinds[index] is kind
            and (x := across.at(record)) is not None
            and (y := up.at(record)) is not None
        ]
        if drawn:
            indices, xs, ys = (list(column) for column in zip(*drawn, strict=True))
            found.append(Points(kind, indices, xs, ys))
    return found


def objective_png(view: View) -> bytes:
    """The picture as PNG, 1500 x 930 pixels; every trial that has both numbers."""
    from matplotlib.figure import Figure  # 0.3 s that only a picture needs

    figure = Figure(figsize=(10, 6.2), dpi=150, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    across, up = axes_of(view)
    for points in points_of(view):
        axes.scatter(
            points.xs,
            points.ys,
            color=COLORS[points.kind],
            marker="*" if points.kind is Kind.BEST else "o",
            s=330 if points.kind is Kind.BEST else 40,
            label=labels(view)[points.kind],
            zorder=4 if points.kind in (Kind.FRONT, Kind.BEST) else 3,
        )
    axes.set_xlabel(across.title)
    axes.set_ylabel(up.title)
    title = f"{view.space.name} on {view.gpu.name}: {view.source}"
    axes.set_title(title.replace("$", r"\$"), loc="left", fontsize=13, fontweight="bold")
    axes.grid(color="#e5e7eb", lw=0.8)
    axes.set_axisbelow(True)
    axes.ticklabel_format(style="plain", useOffset=False)
    if view.records:
        figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def objective_figure(view: View) -> dict[str, Any]:
    """The same as data for plotly.js; points carry their index into the table of trials."""
    import plotly.graph_objects as go  # only where a report is written

    figure = go.Figure()
    across, up = axes_of(view)
    for points in points_of(view):
        best = points.kind is Kind.BEST
        figure.add_scatter(
            x=points.xs,
            y=points.ys,
            mode="markers",
            customdata=points.indices,
            hovertemplate="%{text}<extra></extra>",
            marker={
                "symbol": "star" if best else "circle",
                "size": 19 if best else 9,
                "color": COLORS[points.kind],
            },
            name=labels(view)[points.kind],
        )
    figure.update_layout(
        template="none",
        xaxis={"title": {"text": across.title}, "exponentformat": "none"},
        yaxis={"title": {"text": up.title}, "exponentformat": "none"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        margin={"l": 64, "r": 16, "t": 40, "b": 52},
        hovermode="closest",
    )
    data: dict[str, Any] = json.loads(figure.to_json())
    return {"data": data["data"], "layout": data["layout"]}
