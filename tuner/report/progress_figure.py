"""Progress of a search after each trial: hypervolume and the fastest that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.core.records import Source, Status, TrialRecord
from tuner.report.plot import COLORS, plotly_data
from tuner.searches.front import hypervolume, pareto_front
from tuner.searches.view import Kind, View

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_POINTS = 400
"""Trials that a line is drawn through, evenly spread over all, the last one included."""
_COUNTED = (Kind.BEST, Kind.FRONT, Kind.FITS)


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """The progress of a search after one of its trials.

    `hypervolume` is a share of what all trials came to, `throughput` of the fastest that fits;
    `trial_s` the time that trials had taken together, of those that ran on a device.
    """

    trials: int
    hypervolume: float
    throughput: float
    trial_s: float
    oom: int


def progress(view: View) -> list[SearchProgress]:
    """After each trial that ran, in the order of the journal; empty when nothing fits."""
    reference = (0.0, float(view.gpu.memory_bytes))
    front: tuple[TrialRecord, ...] = ()
    area, fastest, trial_s, oom = 0.0, 0.0, 0.0, 0
    rows: list[tuple[float, float, float, int]] = []
    for record, kind in zip(view.records, view.kinds, strict=True):
        evidence = record.outcome.evidence
        if record.source is Source.PREDICTED:
            continue
        if kind in _COUNTED and evidence is not None:
            fastest = max(fastest, evidence.speed.samples_per_s)
            now = pareto_front((*front, record), limit_bytes=view.gpu.memory_bytes)
            if now != front:
                front, area = now, hypervolume(now, reference=reference)
        if record.source is Source.MEASURED:
            trial_s += record.outcome.duration_s
        oom += record.outcome.status is Status.OOM
        rows.append((area, fastest, trial_s, oom))
    if not rows or not area or not fastest:
        return []
    return [
        SearchProgress(number, done / area, speed / fastest, seconds, ooms)
        for number, (done, speed, seconds, ooms) in enumerate(rows, start=1)
    ]


def progress_figure(rows: Sequence[SearchProgress]) -> dict[str, Any] | None:
    """The share of the final result against trials, and against their time where it is known.

    None when nothing fits, or there was only one trial.
    """
    from plotly.subplots import make_subplots  # only where a report is written

    if len(rows) < 2:
        return None
    step = -(-len(rows) // MAX_POINTS)
    rows = rows[::-step][::-1]
    timed = rows[-1].trial_s > 0
    figure = make_subplots(rows=1, cols=2 if timed else 1, horizontal_spacing=0.1)
    _add(figure, rows, [float(row.trials) for row in rows], "trials", column=1)
    if timed:
        unit, name = _unit(rows[-1].trial_s)
        title = f"time of trials on the device, {name}"
        _add(figure, rows, [row.trial_s / unit for row in rows], title, column=2)
    figure.update_yaxes(range=[0, 105], ticksuffix=" %")
    figure.update_layout(
        template="none",
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        margin={"l": 56, "r": 16, "t": 34, "b": 46},
    )
    return plotly_data(figure)


def progress_text(rows: Sequence[SearchProgress]) -> str:
    """A sentence on when the front and the fastest were nearly found; empty when nothing fits."""
    if not rows:
        return ""
    volume = next(row.trials for row in rows if row.hypervolume >= 0.99)
    speed = next(row.trials for row in rows if row.throughput >= 0.98)
    return (
        f"99 % of the hypervolume of all {len(rows)} trials was reached after {volume}, a "
        f"configuration within 2 % of the fastest after {speed}; {rows[-1].oom} ran out of memory"
    )


def _add(
    figure: Figure,
    rows: Sequence[SearchProgress],
    across: Sequence[float],
    title: str,
    *,
    column: int,
) -> None:
    lines = (
        ("hypervolume", [row.hypervolume for row in rows], COLORS[Kind.FRONT]),
        ("fastest that fits", [row.throughput for row in rows], COLORS[Kind.BEST]),
        (
            "out of memory, share of trials",
            [r.oom / r.trials for r in rows],
            COLORS[Kind.TOO_LARGE],
        ),
    )
    for name, shares, color in lines:
        is_oom = name.startswith("out")
        figure.add_scatter(
            x=[float(f"{x:.5g}") for x in across],
            y=[round(100 * share, 2) for share in shares],
            name=name,
            mode="lines",
            line={"shape": "hv", "color": color, "width": 2, "dash": "dot" if is_oom else "solid"},
            hovertemplate="%{y:.1f} %",
            showlegend=column == 1,
            row=1,
            col=column,
        )
    figure.update_xaxes(title=title, rangemode="tozero", row=1, col=column)


def _unit(seconds: float) -> tuple[float, str]:
    if seconds < 120:
        return 1.0, "s"
    return (60.0, "min") if seconds < 7200 else (3600.0, "h")
