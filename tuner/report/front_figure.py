"""The front: throughput against memory, or other objectives; for the report and as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.core.records import TrialRecord
from tuner.core.units import GIB
from tuner.report.plot import (
    COLORS,
    EMULATED_COLOR,
    PLAIN_TICKS,
    UNDECIDED_LABEL,
    emulated_among_others,
    is_limit_far,
    labels,
    memory_range_gib,
    plotly_data,
    throughput_range,
)
from tuner.searches.facts import rounded
from tuner.searches.front import DEVICE_MEMORY, Objective
from tuner.searches.view import Kind, View, numbers_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


DRAW_ORDER = (
    Kind.TOO_LARGE,
    Kind.FAILED,
    Kind.UNTRIED,
    Kind.OUTSIDE,
    Kind.FITS,
    Kind.FRONT,
    Kind.BEST,
)


SYMBOLS: Mapping[Kind, tuple[str, int, float]] = {  # symbol, size, opacity
    Kind.TOO_LARGE: ("x-thin-open", 7, 0.8),
    Kind.FAILED: ("diamond", 7, 0.75),
    Kind.OUTSIDE: ("circle", 6, 0.45),
    Kind.UNTRIED: ("circle", 6, 0.6),
    Kind.FITS: ("circle", 8, 0.75),
    Kind.FRONT: ("circle", 11, 1.0),
    Kind.BEST: ("star", 19, 1.0),
}


@dataclass(frozen=True, slots=True)
class PlotAxis:
    """One objective with its title; sizes are drawn in GiB."""

    objective: Objective
    title: str
    unit: float = 1.0

    def at(self, record: TrialRecord) -> float | None:
        """A trial's place on the axis; None without such a number."""
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
    for kind in DRAW_ORDER:
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
    """The front over other objectives, as data for plotly.js.

    Points carry their index into the table of trials.
    """
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
    return plotly_data(figure)


def front_figure(view: View) -> dict[str, Any]:
    """Throughput against peak device memory: every trial, the front and the GPU's memory."""
    import plotly.graph_objects as go  # only where a report is written

    figure = go.Figure()
    front = [drawn_point(numbers_of(r)) for r in view.front]
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
    for kind, indices in by_kind(view).items():
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
            **PLAIN_TICKS,
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
    return plotly_data(figure)


def _add_points(figure: Figure, view: View, kind: Kind, indices: Sequence[int]) -> None:
    symbol, size, opacity = SYMBOLS[kind]
    points = [drawn_point(view.numbers[i]) for i in indices]
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
    points = [drawn_point(view.numbers[i]) for i in found]
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
    points = [drawn_point(numbers_of(record)) for record in view.undecided]
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


def by_kind(view: View) -> dict[Kind, list[int]]:
    """The places of the trials with numbers by how they are drawn, in the order of drawing."""
    found: dict[Kind, list[int]] = {kind: [] for kind in DRAW_ORDER}
    for place, (numbers, kind) in enumerate(zip(view.numbers, view.kinds, strict=True)):
        if numbers:
            found[kind].append(place)
    return found


def drawn_point(numbers: tuple[int, float] | None) -> tuple[float, float]:
    """Memory in GiB and throughput in samples/s, no finer than a screen can show."""
    size, speed = numbers or (0, 0.0)
    return round(size / GIB, 3), rounded(speed)
