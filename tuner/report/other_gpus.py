"""The results of one search space on several GPU types, side by side.

The numbers of another GPU type are read from `pareto.csv` and `best.yaml` of its own search, with
the conditions it was searched under.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tuner.core.errors import InputError
from tuner.core.expressions import all_of
from tuner.core.files import read_file
from tuner.core.records import Source, TrialRecord
from tuner.core.units import GIB, format_duration, format_gib, significant
from tuner.report.plot import plotly_data, plotly_text
from tuner.report.table import cell_value, value_text
from tuner.searches.cost import run_cost
from tuner.searches.facts import rounded
from tuner.searches.front import device_bytes, samples_per_s
from tuner.searches.store import ResultsFolder
from tuner.searches.view import View

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_BYTES = 16 * 1024 * 1024
"""A front of tens of thousands of configurations; what is larger is none."""


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One configuration of a front. `settings` are the values of the knobs, by name, as text."""

    device_bytes: int
    samples_per_s: float
    source: str
    settings: Mapping[str, str]
    recommended: bool


@dataclass(frozen=True, slots=True)
class GpuFront:
    """The result of a space on one GPU type; `points` is empty when nothing fits.

    `epoch_s` and `epoch_usd` are those of the recommended configuration, None where unknown.
    `report` is the address of its report, relative to that of another GPU type.
    """

    gpu: str
    gpu_name: str
    memory_bytes: int
    points: tuple[FrontPoint, ...]
    epoch_s: float | None
    epoch_usd: float | None
    conditions: str
    report: str = ""

    @property
    def best(self) -> FrontPoint | None:
        """The recommended configuration."""
        return next((point for point in self.points if point.recommended), None)


@dataclass(frozen=True, slots=True)
class OtherGpus:
    """The other GPU types of a space, by id; `unreadable` are folders whose files are broken."""

    fronts: tuple[GpuFront, ...] = ()
    unreadable: tuple[str, ...] = ()


def read_other_gpus(
    folder: ResultsFolder, knobs: Sequence[str], written_together: Collection[str] = ()
) -> OtherGpus:
    """The results in the folders beside `folder`: other GPU types that the space was searched on.

    `knobs` are the names of the settings that are shown of each configuration. A report is linked
    to where there is one, or is about to be: that of the types `written_together`.
    """
    fronts, unreadable = [], []
    found = sorted(folder.path.parent.glob("*/best.yaml"))
    for path in (path.parent for path in found if path.parent != folder.path):
        try:
            fronts.append(_read(path, knobs, written_together))
        # Edited, of another version, or not ours at all: a neighbour ends no search.
        except (OSError, InputError, KeyError, TypeError, ValueError, OverflowError, csv.Error):
            unreadable.append(path.name)
    return OtherGpus(tuple(fronts), tuple(unreadable))


def front_of(view: View) -> GpuFront:
    """The front of the GPU type that `view` is about."""
    best = view.best
    cost = run_cost(best.record, view.space, view.gpu) if best else None
    return GpuFront(
        gpu=view.gpu.id,
        gpu_name=view.gpu.name,
        memory_bytes=view.gpu.memory_bytes,
        points=tuple(_point(record, view) for record in view.front),
        epoch_s=cost.epoch_s if cost else None,
        epoch_usd=cost.epoch_usd if cost else None,
        conditions=all_of(view.conditions),
    )


def _point(record: TrialRecord, view: View) -> FrontPoint:
    evidence, best = record.outcome.evidence, view.best
    return FrontPoint(
        device_bytes=device_bytes(record) or 0,
        samples_per_s=samples_per_s(record) or 0.0,
        source=str(evidence.source) if evidence else "",
        settings={name: value_text(record.configuration.get(name)) for name in view.knobs},
        recommended=best is not None and best.configuration == record.configuration,
    )


def _read(path: Path, knobs: Sequence[str], written_together: Collection[str]) -> GpuFront:
    """The front in the folder at `path`. Raises `OSError`, or ValueError for what is none."""
    try:
        found = _mapping(yaml.safe_load(read_file(path / "best.yaml", MAX_BYTES)))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    run, gpu = _mapping(found.get("run") or {}), _mapping(found.get("gpu"))
    conditions = _mapping(found.get("chosen_from") or {}).get("conditions") or ()
    if not all(isinstance(condition, str) for condition in conditions):
        raise TypeError("a condition is no text")  # aliases of aliases would make gigabytes of it
    has_report = path.name in written_together or (path / "report.html").exists()
    rows = list(
        csv.DictReader(io.StringIO(read_file(path / "pareto.csv", MAX_BYTES).decode("utf-8")))
    )
    return GpuFront(
        gpu=_word(gpu["id"]),
        gpu_name=_word(gpu["name"]),
        memory_bytes=_size(gpu["memory_bytes"]),
        points=tuple(_row_point(row, knobs) for row in rows),
        epoch_s=_number(run.get("time_per_epoch_s")),
        epoch_usd=_number(run.get("cost_per_epoch_usd")),
        conditions=all_of(list(conditions)),
        report=f"../{path.name}/report.html" if has_report else "",
    )


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r:.60} is no mapping")
    return value


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is no text")
    return value


def _row_point(row: Mapping[str, str], knobs: Sequence[str]) -> FrontPoint:
    rate = _number(float(row["samples_per_s"]))
    if rate is None:
        raise ValueError(f"{row['samples_per_s']} samples/s is no rate")
    return FrontPoint(
        device_bytes=_size(int(row["device_bytes"])),
        samples_per_s=rate,
        source=row["source"],
        settings={name: cell_value(row[name]) for name in knobs if name in row},
        recommended=row["recommended"] == "true",
    )


def _size(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.60} is no number of bytes")
    return value


def _number(value: object) -> float | None:
    """A number of at least 0; None for everything else."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)


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
    return plotly_data(figure)


MARKS: Mapping[str, str] = {Source.MEASURED: "", Source.EMULATED: "-open-dot"}
"""Suffix of plotly.js's symbol name, by the source of its numbers; predicted ones are open."""


def has_emulated(fronts: Iterable[GpuFront]) -> bool:
    """True when a point of these fronts is emulated."""
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
        y=[rounded(point.samples_per_s) for point in points],
        mode="lines+markers" if lines else "markers",
        name=plotly_text(f"{front.gpu} ({_sources(points)})"),
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
    words = [plotly_text(f"{name}={value}") for name, value in point.settings.items() if value]
    lines = [" ".join(words[i : i + 3]) for i in range(0, len(words), 3)]
    head = f"<b>{plotly_text(front.gpu_name)}</b>" + (", recommended" if point.recommended else "")
    numbers = f"{significant(point.samples_per_s)} samples/s, {format_gib(point.device_bytes)}"
    return "<br>".join([head, f"{numbers} ({plotly_text(point.source)})", *lines])
