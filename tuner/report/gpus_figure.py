"""The fronts of several GPU types in one figure, and the table that says the same."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.core.records import Source
from tuner.core.units import GIB, format_duration, format_gib, printable, significant
from tuner.report.other_gpus import FrontPoint, GpuFront

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PALETTE = (
    "#0d9488",
    "#d97706",
    "#4f7cd6",
    "#c65fa8",
    "#8e6bd1",
    "#d9534f",
    "#6b8e23",
    "#64707f",
)
"""Readable on white and on black; the first is the GPU type that the report is about."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon", "cross", "x")
"""Beside the colours, for those who cannot tell them apart."""


def gpus_figure(fronts: Sequence[GpuFront], *, lines: bool = True) -> dict[str, Any] | None:
    """Throughput against memory of each GPU type's front, and how much memory each type has.

    Filled points are measured, open ones predicted. None unless two types have a front. With
    `lines` false only points: the fronts are over other objectives.
    """
    import plotly.graph_objects as go  # only where a report is written

    drawn = [front for front in fronts if front.points]
    if len(drawn) < 2:
        return None
    figure = go.Figure()
    for number, front in enumerate(drawn):
        _add_front(figure, front, number, lines=lines)
    for number, front in enumerate(drawn):
        line = {"color": PALETTE[number % len(PALETTE)], "width": 1.2, "dash": "dash"}
        figure.add_vline(x=front.memory_bytes / GIB, line=line)
    figure.update_layout(
        template="none",
        xaxis={"title": {"text": "peak device memory, GiB"}, "rangemode": "tozero"},
        yaxis={
            "title": {"text": "throughput, samples/s"},
            "rangemode": "tozero",
            "exponentformat": "none",
        },
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        margin={"l": 64, "r": 16, "t": 40, "b": 52},
        hovermode="closest",
    )
    data: dict[str, Any] = json.loads(figure.to_json())
    return {"data": data["data"], "layout": data["layout"]}


MARKS: Mapping[str, str] = {Source.MEASURED: "", Source.EMULATED: "-open-dot"}
"""What plotly.js adds to the name of a symbol, by the kind of its numbers; open where predicted."""


def has_emulated(fronts: Iterable[GpuFront]) -> bool:
    """Whether a point of these fronts is emulated."""
    return any(point.source == Source.EMULATED for front in fronts for point in front.points)


def gpu_rows(fronts: Sequence[GpuFront]) -> list[dict[str, Any]]:
    """One row for each GPU type, the cheapest epoch first, then the fastest; then the others.

    Of the settings those that differ between the types.
    """
    settings = [front.best.settings for front in fronts if front.best]
    names = dict.fromkeys(name for values in settings for name in values)
    differing = [name for name in names if len({values.get(name) for values in settings}) > 1]
    return [_row(front, differing) for front in sorted(fronts, key=_order)]


def same_conditions(fronts: Sequence[GpuFront]) -> str | None:
    """The conditions that all types were searched under; None where they differ."""
    found = {front.conditions for front in fronts}
    return found.pop() if len(found) == 1 else None


def _row(front: GpuFront, names: Sequence[str]) -> dict[str, Any]:
    best = front.best
    return {
        "gpu": front.gpu,
        "name": front.gpu_name,
        "report": front.report,
        "usd": "" if front.epoch_usd is None else f"{front.epoch_usd:,.2f}",
        "epoch": "" if front.epoch_s is None else format_duration(front.epoch_s),
        "samples": significant(best.samples_per_s) if best else "",
        "memory": f"{best.device_bytes / GIB:.2f} of {format_gib(front.memory_bytes)}"
        if best
        else f"nothing fits {format_gib(front.memory_bytes)}",
        "source": best.source if best else "",
        "conditions": front.conditions,
        "settings": " ".join(f"{name}={best.settings.get(name, '')}" for name in names)
        if best
        else "",
    }


def _order(front: GpuFront) -> tuple[bool, bool, float, float]:
    speed = front.best.samples_per_s if front.best else 0.0
    usd = front.epoch_usd
    return (front.best is None, usd is None, usd or 0.0, -speed)


def _add_front(figure: Figure, front: GpuFront, number: int, *, lines: bool) -> None:
    color = PALETTE[number % len(PALETTE)]
    symbol = SYMBOLS[number % len(SYMBOLS)]
    points = sorted(front.points, key=lambda point: point.device_bytes)
    figure.add_scatter(
        x=[round(point.device_bytes / GIB, 3) for point in points],
        y=[float(f"{point.samples_per_s:.6g}") for point in points],
        mode="lines+markers" if lines else "markers",
        name=_plain(f"{front.gpu} ({_sources(points)})"),
        line={"shape": "hv", "color": color, "width": 2},
        marker={
            "symbol": [symbol + MARKS.get(p.source, "-open") for p in points],
            "size": [15 if point.recommended else 9 for point in points],
            "color": color,
            "line": {"width": 2, "color": color},
        },
        text=[_hover(front, point) for point in points],
        hovertemplate="%{text}<extra></extra>",
    )


def _sources(points: Sequence[FrontPoint]) -> str:
    known = {point.source for point in points}
    return " and ".join(source for source in Source if source in known)


def _hover(front: GpuFront, point: FrontPoint) -> str:
    words = [_plain(f"{name}={value}") for name, value in point.settings.items() if value]
    lines = [" ".join(words[i : i + 3]) for i in range(0, len(words), 3)]
    head = f"<b>{_plain(front.gpu_name)}</b>" + (", recommended" if point.recommended else "")
    numbers = f"{significant(point.samples_per_s)} samples/s, {format_gib(point.device_bytes)}"
    return "<br>".join([head, f"{numbers} ({_plain(point.source)})", *lines])


def _plain(text: str) -> str:
    """`text` in which plotly.js finds no tag and no formula."""
    return html.escape(printable(text)).replace("$", "&#36;")
