"""`pareto.png`: every trial as a point, the front, the GPU's memory and the best, in one look."""

from __future__ import annotations

import html
import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.core.expressions import all_of
from tuner.core.records import Source, TrialRecord
from tuner.core.units import GIB, format_gib, format_size, printable, significant
from tuner.report.table import value_text
from tuner.searches.front import device_bytes, samples_per_s
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
UNDECIDED_LABEL = "order not certain"
"""In the legend: points of the front that may be no faster than the next smaller one."""
EMULATED_COLOR = "#7a4fd0"
"""The ring around what was emulated, where a picture has numbers of other kinds too."""
PLAIN_TICKS = {"exponentformat": "none", "separatethousands": True}
"""Ticks read 0.0005 and 12,000, where plotly.js would write 500μ and 12k."""
_INK, _FAINT = "#1f2937", "#6b7280"
HEADER_WIDTH = 115
"""Characters of a line above the axes."""
FAR = 0.25
"""If no trial uses this share of the GPU's memory, the axis ends at the largest trial."""
BEYOND = 1.35
"""The memory axis ends at this multiple of the GPU's memory; what lies beyond is counted."""


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


def count_beyond(view: View) -> int:
    """The number of trials that need more memory than the axis shows."""
    _, end = memory_range_gib(view)
    return sum(numbers[0] / GIB > end for numbers in view.numbers if numbers)


def pareto_png(view: View) -> bytes:
    """The picture as PNG, 1500 x 930 pixels. No global state of matplotlib is touched."""
    # 0.3 s to import, which `tuner best` and `show` do not need.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.2), dpi=150, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    _draw_limits(axes, view)
    _draw_trials(axes, view)
    _draw_best(axes, view)
    _dress(axes, view)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_limits(axes: Axes, view: View) -> None:
    if is_limit_far(view):
        return
    limit = view.gpu.memory_bytes / GIB
    margin = view.margin_bytes / GIB
    end = memory_range_gib(view)[1]
    axes.axvspan(limit, max(end, limit), color=COLORS[Kind.TOO_LARGE], alpha=0.07, lw=0)
    axes.axvline(limit, color=COLORS[Kind.TOO_LARGE], lw=1.6, zorder=2)
    _say(axes, limit, f"memory {limit:.2f} GiB", color="#b42318", side="left")
    if margin > 0:
        axes.axvspan(limit - margin, limit, color=COLORS[Kind.BEST], alpha=0.13, lw=0)
        axes.axvline(limit - margin, color="#b7791f", lw=1.1, ls=(0, (5, 3)), zorder=2)
        text = f"limit with {margin:.2f} GiB margin"
        _say(axes, limit - margin, text, color="#8a5a0b", side="right")


def _say(axes: Axes, x: float, text: str, *, color: str, side: str) -> None:
    """A line's name along the line, at the bottom, where a fast front leaves room."""
    from matplotlib.patheffects import withStroke

    offset, align = ((4, "left"), (-4, "right"))[side == "right"]
    axes.annotate(
        _plain(text),
        (x, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(offset, 0),
        textcoords="offset points",
        rotation=90,
        ha=align,
        va="bottom",
        fontsize=8.5,
        color=color,
        path_effects=[withStroke(linewidth=3, foreground="white")],
        zorder=5,
    )


def _draw_trials(axes: Axes, view: View) -> None:
    styles: Sequence[tuple[Kind, str, float, float]] = (
        (Kind.TOO_LARGE, "x", 26, 0.75),
        (Kind.FAILED, "d", 26, 0.75),
        (Kind.OUTSIDE, "o", 18, 0.45),
        (Kind.UNTRIED, "o", 18, 0.6),
        (Kind.FITS, "o", 30, 0.75),
        (Kind.FRONT, "o", 46, 1.0),
    )
    names = labels(view)
    for kind, marker, size, alpha in styles:
        points = _points(view, kind)
        if points:
            crowd = 0.55 if len(points) > 500 else 1.0
            axes.scatter(
                [x for x, _ in points],
                [y for _, y in points],
                marker=marker,
                s=size * crowd,
                alpha=alpha * crowd if kind is not Kind.FRONT else 1.0,
                color=COLORS[kind],
                linewidths=1.3 if marker == "x" else 0,
                label=f"{names[kind]} ({len(view.front) if kind is Kind.FRONT else len(points)})",
                zorder=4 if kind is Kind.FRONT else 3,
            )
    ringed = [view.records[i] for i in emulated_among_others(view)]
    rings = [_point(r) for r in ringed if r.outcome.evidence is not None]
    if rings:
        axes.scatter(
            [x for x, _ in rings],
            [y for _, y in rings],
            s=90,
            facecolors="none",
            edgecolors=EMULATED_COLOR,
            linewidths=1.1,
            label=f"emulated ({len(rings)})",
            zorder=5,
        )
    _draw_undecided(axes, view)
    front = [_point(r) for r in view.front]
    if front:
        # From each front trial on, its throughput is available up to the GPU's memory.
        xs = [p[0] for p in front] + [view.gpu.memory_bytes / GIB - view.margin_bytes / GIB]
        ys = [p[1] for p in front] + [front[-1][1]]
        axes.step(xs, ys, where="post", color=COLORS[Kind.FRONT], lw=1.8, alpha=0.8, zorder=3)


def _draw_undecided(axes: Axes, view: View) -> None:
    """A white centre in points of the front whose order is not certain."""
    points = [_point(r) for r in view.undecided]
    if points:
        axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            s=14,
            color="white",
            edgecolors=COLORS[Kind.FRONT],
            linewidths=0.6,
            label=f"{UNDECIDED_LABEL} ({len(points)})",
            zorder=7,
        )


def _draw_best(axes: Axes, view: View) -> None:
    if view.best is None:
        axes.set_title("Nothing fits with its headroom", color="#b42318", fontsize=10, loc="right")
        return
    x, y = _point(view.best.record)
    axes.scatter(
        [x],
        [y],
        marker="*",
        s=330,
        color=COLORS[Kind.BEST],
        edgecolors="white",
        linewidths=1.2,
        zorder=6,
        label="recommended",
    )


def _header(view: View) -> list[str]:
    """The lines between title and axes, where they can hide no trial."""
    lines = [subtitle(view)]
    best = view.best
    if best is not None:
        speed, size = best.evidence.speed, best.evidence.memory.device_bytes
        samples = f"{significant(speed.samples_per_s)} samples/s"
        tokens = f" ({significant(speed.tokens_per_s)} tokens/s)" if speed.tokens_per_s else ""
        settings = [f"{name} {value_text(best.configuration.get(name))}" for name in view.knobs]
        stage = best.evidence.limiting_stage
        memory = format_size(size) + (f" (stage {stage})" if stage else "")
        text = f"\N{BLACK STAR} {samples}{tokens} in {memory}: {', '.join(settings)}"
        lines += textwrap.wrap(text, HEADER_WIDTH, max_lines=3, placeholder=" ...")
    return lines


def _dress(axes: Axes, view: View) -> None:
    memory = memory_range_gib(view)
    axes.set_xlim(*memory)
    axes.set_ylim(*throughput_range(view, memory[1]))
    axes.set_xlabel(f"peak device memory ({view.drawn_source}), GiB", color=_INK, fontsize=10.5)
    axes.set_ylabel(f"throughput ({view.drawn_source}), samples/s", color=_INK, fontsize=10.5)
    title = f"{view.space.name} on {view.gpu.name}: {view.source}"
    header = _header(view)
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
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(
        handles[::-1],
        labels[::-1],
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=9,
    )


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
    beyond = count_beyond(view)
    if beyond:
        end = memory_range_gib(view)[1] * GIB
        parts.append(f"{beyond:,} need more than {format_gib(end)}")
    return " · ".join(parts)


def _points(view: View, kind: Kind) -> list[tuple[float, float]]:
    return [
        (numbers[0] / GIB, numbers[1])
        for numbers, k in zip(view.numbers, view.kinds, strict=True)
        if k is kind and numbers
    ]


def _point(record: TrialRecord) -> tuple[float, float]:
    return (device_bytes(record) or 0) / GIB, samples_per_s(record) or 0.0


def _plain(text: str) -> str:
    """`text` so that matplotlib shows it as it is: no formula between dollar signs."""
    shown = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    return shown.replace("$", r"\$")


def plotly_data(figure: Figure) -> dict[str, Any]:
    """`data` and `layout` of a plotly figure as JSON types."""
    data: dict[str, Any] = json.loads(figure.to_json())
    return {"data": data["data"], "layout": data["layout"]}


def plotly_text(text: str) -> str:
    """`text` in which plotly.js finds no tag and no formula."""
    return html.escape(printable(text)).replace("$", "&#36;")
