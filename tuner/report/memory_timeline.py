"""The recommended configuration's memory over one optimizer step: its file and its figure.

A timeline takes seconds of tracing, so `memory_course.json` keeps it for the next report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.core.errors import InputError
from tuner.core.files import read_file
from tuner.core.units import GIB
from tuner.report.plot import COLORS, plotly_data
from tuner.searches.best import BestTrial
from tuner.searches.view import Kind

if TYPE_CHECKING:
    from tuner.cost.step_details import MemoryTimeline

MAX_BYTES = 64 << 20

TimelineOf = Callable[["BestTrial"], "MemoryTimeline | None"]
"""Works a timeline out; None where nothing is known of the code that trains."""


def load_or_trace(path: Path, best: BestTrial, trace: TimelineOf) -> MemoryTimeline | None:
    """The timeline in `path` where it is of `best`, else a new one. Writes nothing."""
    return _stored(path, best) or trace(best)


def timeline_json(timeline: MemoryTimeline, best: BestTrial) -> str:
    """The text of the file."""
    return json.dumps({"of": _subject(best), "course": timeline.to_dict()}, separators=(",", ":"))


def _subject(best: BestTrial) -> dict[str, Any]:
    return {
        "configuration": best.configuration.to_dict(),
        "gpu": best.gpu.id,
        "gpu_memory_bytes": best.gpu.memory_bytes,
        "versions": dict(best.record.versions),
    }


def _stored(path: Path, best: BestTrial) -> MemoryTimeline | None:
    """The timeline in `path` when it belongs to `best` and is whole, else None."""
    from tuner.cost.step_details import MemoryTimeline

    try:
        found = json.loads(read_file(path, MAX_BYTES))
        return MemoryTimeline.from_dict(found["course"]) if found["of"] == _subject(best) else None
    # None yet, edited, or of another version.
    except (
        OSError, InputError, KeyError, TypeError, ValueError, AttributeError, RecursionError
    ):  # fmt: skip
        return None


def timeline_figure(
    timeline: MemoryTimeline, memory_bytes: int, colors: Mapping[str, str]
) -> dict[str, Any]:
    """Allocated memory stacked by what it is for, reserved memory, and the phases.

    `memory_bytes` is the GPU's; `colors` by category name.
    """
    import plotly.graph_objects as go  # only where a report is written

    figure = go.Figure()
    for name, sizes in timeline.categories.items():
        color = colors[name]
        figure.add_scatter(
            x=timeline.times_s,
            y=[round(size / GIB, 3) for size in sizes],
            name=name.replace("_", " "),
            mode="lines",
            line={"width": 0.5, "color": color, "shape": "hv"},
            fillcolor=color,
            stackgroup="allocated",
            hovertemplate="%{y:.2f} GiB",
        )
    figure.add_scatter(
        x=timeline.times_s,
        y=[round(size / GIB, 3) for size in timeline.reserved_bytes],
        name="reserved by the allocator",
        mode="lines",
        line={"color": "#64707f", "width": 1.6, "dash": "dot", "shape": "hv"},
        hovertemplate="%{y:.2f} GiB",
    )
    top = max(*timeline.totals, *timeline.reserved_bytes) / GIB
    limit = memory_bytes / GIB
    if limit < 2 * top:
        figure.add_hline(y=limit, line={"color": COLORS[Kind.TOO_LARGE], "width": 2})
        top = limit
    end_s = timeline.spans[-1].end_s
    for number, span in enumerate(timeline.spans):
        ends = {"x0": span.start_s, "x1": span.end_s}
        if number % 2:
            shade = {"fillcolor": "#8a94a6", "opacity": 0.12, "layer": "below", "line_width": 0}
            figure.add_vrect(**ends, **shade)
        if span.end_s - span.start_s > 0.08 * end_s:
            at = {"x": (span.start_s + span.end_s) / 2, "y": 1.0, "yref": "paper"}
            look = {"yanchor": "bottom", "showarrow": False, "font": {"size": 12}}
            figure.add_annotation(text=span.phase, **at, **look)
    figure.update_layout(
        template="none",
        hovermode="x unified",
        xaxis={"title": {"text": "predicted time in the step, s"}, "range": [0, end_s]},
        yaxis={"title": {"text": "GiB"}, "range": [0, top * 1.05]},
        legend={"orientation": "h", "y": -0.19, "yanchor": "top", "x": 0},
        margin={"l": 56, "r": 16, "t": 26, "b": 90},
    )
    return plotly_data(figure)
