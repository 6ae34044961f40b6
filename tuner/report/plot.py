"""The front as a picture: `pareto.png`, and the figure of the report.

Both draw the same layers: throughput against memory, or other objectives.
"""

from __future__ import annotations

import html
import io
import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.core.expressions import all_of
from tuner.core.records import Source, TrialRecord
from tuner.core.units import GIB, format_gib, format_size, printable, significant
from tuner.report.table import value_text
from tuner.searches.facts import rounded
from tuner.searches.front import DEVICE_MEMORY, Objective
from tuner.searches.view import Kind, View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

COLORS: Mapping[Kind, str] = {
    Kind.BEST: "#f2a60d",
    Kind.FRONT: "#0d9488",
    Kind.FITS: "#5b8def",
    Kind.OUTSIDE: "#98a2b3",
    Kind.UNTRIED: "#b6c6e3",
    Kind.TOO_LARGE: "#e5484d",
    Kind.FAILED: "#8d5bb5",
}
LABELS: Mapping[Kind, str] = {
    Kind.BEST: "recommended",
    Kind.FRONT: "Pareto front",
    Kind.FITS: "fits",
    Kind.OUTSIDE: "fits, excluded by conditions",
    Kind.UNTRIED: "predicted to fit, not measured",
    Kind.TOO_LARGE: "does not fit",
    Kind.FAILED: "failed",
}
PLAIN_TICKS = {"exponentformat": "none", "separatethousands": True}
"""Ticks read 0.0005 and 12,000, where plotly.js would write 500μ and 12k."""
_INK, _FAINT, _CLEAR, _WHITE = "#1f2937", "#6b7280", "#ffffff00", "#ffffff"
HEADER_WIDTH = 115
"""Characters of a line above the axes."""
FAR = 0.25
"""If no trial uses this share of the GPU's memory, the axis ends at the largest trial."""
BEYOND = 1.35
"""The memory axis ends at this multiple of the GPU's memory; what lies beyond is counted."""
CROWD = 500
"""More points than this are drawn smaller and paler."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """The look of a point: matplotlib's marker and its area, plotly's symbol and its size."""

    marker: str
    area: float
    symbol: str
    size: float
    opacity: float
    color: str
    edge: str
    width: float = 0.0


_RED, _GREEN = COLORS[Kind.TOO_LARGE], COLORS[Kind.FRONT]
# From the bottom of the picture to its top.
MARKS: Mapping[Kind, _Mark] = {
    Kind.TOO_LARGE: _Mark("x", 26, "x-thin-open", 7, 0.8, _RED, _RED, 1.6),
    Kind.FAILED: _Mark("d", 26, "diamond", 7, 0.75, COLORS[Kind.FAILED], _CLEAR),
    Kind.UNTRIED: _Mark("o", 18, "circle", 6, 0.6, COLORS[Kind.UNTRIED], _CLEAR),
    Kind.OUTSIDE: _Mark("o", 18, "circle", 6, 0.45, COLORS[Kind.OUTSIDE], _CLEAR),
    Kind.FITS: _Mark("o", 30, "circle", 8, 0.75, COLORS[Kind.FITS], _CLEAR),
    Kind.FRONT: _Mark("o", 46, "circle", 11, 1.0, _GREEN, _WHITE, 1.0),
    Kind.BEST: _Mark("*", 330, "star", 19, 1.0, COLORS[Kind.BEST], _WHITE, 1.2),
}
EMULATED = _Mark("o", 90, "circle", 14, 1.0, _CLEAR, "#7a4fd0", 1.1)
"""The ring around what was emulated, where a picture has numbers of other kinds too."""
UNDECIDED = _Mark("o", 14, "circle", 5, 1.0, _WHITE, _GREEN, 0.6)
"""A white centre in points of the front that may be no faster than the next smaller one."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Points that look alike. `indices` are the places in the view's records of a kind's trials."""

    name: str
    mark: _Mark
    xs: list[float]
    ys: list[float]
    indices: list[int]


def labels(view: View) -> Mapping[Kind, str]:
    """The name of each kind in the legend of `view`."""
    untried = [r.source for r, k in zip(view.records, view.kinds, strict=True) if k is Kind.UNTRIED]
    if Source.EMULATED in untried:
        text = "predicted or emulated to fit, not measured"
    else:
        shown = Source.EMULATED if view.source == Source.EMULATED else Source.MEASURED
        text = f"predicted to fit, not {shown}"
    return {**LABELS, Kind.UNTRIED: text}


def emulated_among_others(view: View) -> list[int]:
    """The places of emulated trials in `view.records`; none where all numbers are emulated."""
    found = [i for i, r in enumerate(view.records) if r.source is Source.EMULATED]
    return [] if len(found) == len(view.records) else found


def axes_of(view: View) -> tuple[Objective, Objective]:
    """The second objective and the first; memory where there is only one."""
    first, *more = view.objectives
    return more[0] if more else DEVICE_MEMORY, first


def axis_title(objective: Objective) -> str:
    """The name of an axis: sizes are drawn in GiB."""
    return objective.label.replace("(bytes)", "(GiB)")


def _titles(view: View) -> tuple[str, str]:
    if not view.is_default:
        across, up = axes_of(view)
        return axis_title(across), axis_title(up)
    source = view.drawn_source
    return f"peak device memory ({source}), GiB", f"throughput ({source}), samples/s"


def _place(view: View, record: TrialRecord) -> tuple[float, float] | None:
    """A trial's point, no finer than a screen can show; None without both numbers."""
    found = [
        rounded(value / (GIB if objective.name.endswith("_bytes") else 1))
        for objective in axes_of(view)
        if (value := objective.value(record)) is not None
    ]
    return (found[0], found[1]) if len(found) == 2 else None


def layers(view: View) -> list[_Layer]:
    """All that can be drawn, in the order of drawing."""
    places = [_place(view, record) for record in view.records]
    found = []

    def add(name: str, mark: _Mark, indices: Iterable[int], *, are_shown: bool = False) -> None:
        drawn = [(place, i) for i in indices if (place := places[i]) is not None]
        if drawn:
            xs, ys = (list(axis) for axis in zip(*(place for place, _ in drawn), strict=True))
            shown = [i for _, i in drawn] if are_shown else []
            count = len(view.front) if mark is MARKS[Kind.FRONT] else len(drawn)
            of = "" if mark is MARKS[Kind.BEST] else f" ({count})"
            found.append(_Layer(name + of, mark, xs, ys, shown))

    for kind, mark in MARKS.items():
        of_kind = (i for i, each in enumerate(view.kinds) if each is kind)
        add(labels(view)[kind], mark, of_kind, are_shown=True)
    if view.is_default:
        add("emulated", EMULATED, emulated_among_others(view))
    undecided = {record.configuration.key for record in view.undecided}
    keys = (record.configuration.key for record in view.records)
    add("order not certain", UNDECIDED, (i for i, key in enumerate(keys) if key in undecided))
    return found


def _steps(view: View) -> tuple[list[float], list[float]]:
    """From each trial of the front on, its throughput is available up to the GPU's memory."""
    found = [place for record in view.front if (place := _place(view, record)) is not None]
    if not found or not view.is_default:
        return [], []
    end = (view.gpu.memory_bytes - view.margin_bytes) / GIB
    return [*(x for x, _ in found), end], [*(y for _, y in found), found[-1][1]]


def _limits(view: View) -> list[tuple[float, float, str, str]]:
    """The bands of the GPU's memory and the margin: from, to, their colour and words, in GiB."""
    if not view.is_default or is_limit_far(view):
        return []
    limit, margin = view.gpu.memory_bytes / GIB, view.margin_bytes / GIB
    end = max(memory_range_gib(view)[1], limit)
    found = [(limit, end, _RED, f"memory {limit:.2f} GiB")]
    text = f"limit with {margin:.2f} GiB margin"
    return [*found, (limit - margin, limit, COLORS[Kind.BEST], text)] if margin > 0 else found


def memory_range_gib(view: View) -> tuple[float, float]:
    """Both ends of the memory axis, in GiB: around the trials and the GPU's memory."""
    used = [numbers[0] / GIB for numbers in view.numbers if numbers]
    limit = view.gpu.memory_bytes / GIB
    end = min(max([*used, limit]), limit * BEYOND)
    if used and max(used) < limit * FAR:
        end = max(used)
    # Where all trials are larger, the limits are still in the picture.
    start = min([*used, end, limit - view.margin_bytes / GIB])
    pad = 0.05 * (end - start) or 0.05 * end
    return max(0.0, start - pad), end + pad


def is_limit_far(view: View) -> bool:
    """True when trials use too little of the GPU's memory for it to be on the memory axis."""
    return memory_range_gib(view)[1] < (view.gpu.memory_bytes - view.margin_bytes) / GIB


def throughput_range(view: View, end: float) -> tuple[float, float]:
    """Both ends of the throughput axis, in samples/s, for a memory axis to `end` GiB."""
    speeds = [numbers[1] for numbers in view.numbers if numbers and numbers[0] / GIB <= end]
    low, high = min(speeds, default=0.0), max(speeds, default=1.0)
    pad = 0.08 * (high - low) or 0.1 * high or 1.0
    return max(0.0, low - pad), high + 1.6 * pad


def subtitle(view: View) -> str:
    """The view in one line: its trials, the number that fit, and the conditions."""
    fitting = sum(k in (Kind.BEST, Kind.FRONT, Kind.FITS, Kind.OUTSIDE) for k in view.kinds)
    untried = view.kinds.count(Kind.UNTRIED)
    how = "predicted" if view.drawn_source == Source.PREDICTED else "tried"
    number = len(view.records) - untried
    parts = [f"{number:,} configurations {how}, {fitting:,} fit with the margin"]
    if untried:
        only = labels(view)[Kind.UNTRIED].partition(" to fit")[0]
        parts.append(f"{untried:,} only {only} to fit")
    if view.conditions:
        parts.append("where " + all_of(view.conditions))
    if is_limit_far(view):
        parts.append(f"all far below the {format_gib(view.gpu.memory_bytes)} of memory")
    end = memory_range_gib(view)[1] * GIB
    if beyond := sum(numbers[0] > end for numbers in view.numbers if numbers):
        parts.append(f"{beyond:,} need more than {format_gib(end)}")
    return " · ".join(parts)


# -- pareto.png ---------------------------------------------------------------------------------


def pareto_png(view: View) -> bytes:
    """The picture as PNG, 1500 x 930 pixels. No global state of matplotlib is touched."""
    # 0.3 s to import, which `tuner best` and `show` do not need.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.2), dpi=150, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    for x, until, color, text in _limits(view):
        is_margin = color != _RED
        axes.axvspan(x, until, color=color, alpha=0.13 if is_margin else 0.07, lw=0)
        axes.axvline(x, color=color, lw=1.4, ls="--" if is_margin else "-", zorder=2)
        _say(axes, x, text, is_left=is_margin)
    for number, layer in enumerate(layers(view)):
        mark, crowd = layer.mark, 0.55 if len(layer.xs) > CROWD else 1.0
        axes.scatter(
            layer.xs,
            layer.ys,
            marker=mark.marker,
            s=mark.area * crowd,
            alpha=mark.opacity * crowd if mark.opacity < 1 else None,
            facecolors=mark.edge if mark.marker == "x" else mark.color,
            edgecolors=None if mark.marker == "x" else mark.edge,
            linewidths=mark.width,
            label=layer.name,
            zorder=4 + number / 10,
        )
    axes.step(*_steps(view), where="post", color=_GREEN, lw=1.8, alpha=0.8, zorder=3)
    if view.best is None:
        axes.set_title("Nothing fits with its headroom", color="#b42318", fontsize=10, loc="right")
    _dress(axes, view)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _say(axes: Axes, x: float, text: str, *, is_left: bool) -> None:
    """A line's name along the line, at the bottom, where a fast front leaves room."""
    from matplotlib.patheffects import withStroke

    axes.annotate(
        _plain(text),
        (x, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if is_left else 4, 0),
        textcoords="offset points",
        rotation=90,
        ha="right" if is_left else "left",
        va="bottom",
        fontsize=8.5,
        color="#8a5a0b" if is_left else "#b42318",
        path_effects=[withStroke(linewidth=3, foreground="white")],
        zorder=6,
    )


def _dress(axes: Axes, view: View) -> None:
    across, up = _titles(view)
    if view.is_default:
        memory = memory_range_gib(view)
        axes.set_xlim(*memory)
        axes.set_ylim(*throughput_range(view, memory[1]))
    axes.set_xlabel(across, color=_INK, fontsize=10.5)
    axes.set_ylabel(up, color=_INK, fontsize=10.5)
    title = f"{view.space.name} on {view.gpu.name}: {view.source}"
    header = [subtitle(view)]
    best = view.best
    if best is not None:
        speed, size = best.evidence.speed, best.evidence.memory.device_bytes
        samples = f"{significant(speed.samples_per_s)} samples/s"
        tokens = f" ({significant(speed.tokens_per_s)} tokens/s)" if speed.tokens_per_s else ""
        settings = [f"{name} {value_text(best.configuration.get(name))}" for name in view.knobs]
        stage = best.evidence.limiting_stage
        used = format_size(size) + (f" (stage {stage})" if stage else "")
        text = f"\N{BLACK STAR} {samples}{tokens} in {used}: {', '.join(settings)}"
        header += textwrap.wrap(text, HEADER_WIDTH, max_lines=3, placeholder=" ...")
    pad = 13 + 13 * len(header)
    axes.set_title(_plain(title), loc="left", fontsize=13, fontweight="bold", color=_INK, pad=pad)
    axes.text(
        0,
        1.02,
        _plain("\n".join(header)),
        transform=axes.transAxes,
        fontsize=9,
        linespacing=1.4,
        color=_FAINT,
        va="bottom",
        in_layout=False,  # a long line must not push the axes together
    )
    axes.grid(color="#e5e7eb", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9ca3af")
    axes.tick_params(colors=_FAINT, labelsize=9)
    # As many digits as the distance of the ticks needs; no exponent or offset beside the axis.
    axes.ticklabel_format(style="plain", useOffset=False)
    handles, names = axes.get_legend_handles_labels()
    axes.figure.legend(
        handles[::-1], names[::-1], loc="outside lower center", ncols=6, frameon=False, fontsize=9
    )


def _plain(text: str) -> str:
    """`text` so that matplotlib shows it as it is: no formula between dollar signs."""
    shown = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    return shown.replace("$", r"\$")


# -- the report ---------------------------------------------------------------------------------


def front_figure(view: View) -> dict[str, Any]:
    """The picture as data for plotly.js. Points carry their index into the table of trials."""
    import plotly.graph_objects as go  # only where a report is written

    figure = go.Figure()
    xs, ys = _steps(view)
    if xs:
        line = {"shape": "hv", "color": _GREEN, "width": 2.5}
        figure.add_scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip", showlegend=False)
    for layer in layers(view):
        mark, is_crowd = layer.mark, len(layer.xs) > CROWD
        told = {"customdata": layer.indices, "hovertemplate": "%{text}<extra></extra>"}
        figure.add_scatter(
            x=layer.xs,
            y=layer.ys,
            mode="markers",
            marker={
                "symbol": mark.symbol,
                "size": mark.size * (0.75 if is_crowd else 1),
                "opacity": mark.opacity * (0.7 if is_crowd else 1),
                "color": mark.color,
                "line": {"color": mark.edge, "width": mark.width},
            },
            name=layer.name,
            **(told if layer.indices else {"hoverinfo": "skip"}),
        )
    for x, until, color, text in _limits(view):
        is_margin = color != _RED
        far = until if is_margin else until * 4
        area = {"layer": "below", "line_width": 0, "opacity": 0.13 if is_margin else 0.08}
        figure.add_vrect(x0=x, x1=far, fillcolor=color, **area)
        dash = "dash" if is_margin else "solid"
        figure.add_vline(x=x, line={"color": color, "width": 1.5 if is_margin else 2, "dash": dash})
        side = {"xanchor": "right" if is_margin else "left", "yanchor": "bottom", "textangle": -90}
        at = {"x": x, "y": 0.015, "yref": "paper", "showarrow": False, "font": {"size": 12}}
        figure.add_annotation(text=text, **at, **side)
    across, up = _titles(view)
    ranges: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    if view.is_default:
        memory = memory_range_gib(view)
        ranges = {"range": list(memory)}, {"range": list(throughput_range(view, memory[1]))}
    figure.update_layout(
        template="none",
        xaxis={"title": {"text": across}, "exponentformat": "none", **ranges[0]},
        yaxis={"title": {"text": up}, **PLAIN_TICKS, **ranges[1]},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "reversed"},
        margin={"l": 64, "r": 16, "t": 40, "b": 52},
        hovermode="closest",
        dragmode="zoom",
    )
    return plotly_data(figure)


def plotly_data(figure: Figure) -> dict[str, Any]:
    """`data` and `layout` of a plotly figure as JSON types."""
    data: dict[str, Any] = json.loads(figure.to_json())
    return {"data": data["data"], "layout": data["layout"]}


def plotly_text(text: str) -> str:
    """`text` in which plotly.js finds no tag and no formula."""
    return html.escape(printable(text)).replace("$", "&#36;")
