"""`report.html`: one self-contained file that works offline, in light and in dark.

Its small figure of the parameters shows the fastest configuration that fits, at each value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from msgspec.json import encode

from tuner.core.expressions import all_of
from tuner.core.records import KnobValue, MemoryCategory, TrialRecord
from tuner.core.units import (
    GIB,
    MIB,
    format_duration,
    format_gib,
    format_size,
    printable,
    significant,
)
from tuner.report.memory_timeline import TimelineOf, load_or_trace, timeline_figure, timeline_json
from tuner.report.plot import (
    COLORS,
    PLAIN_TICKS,
    axes_of,
    axis_title,
    front_figure,
    labels,
    pareto_png,
    plotly_data,
    plotly_text,
    subtitle,
)
from tuner.report.table import front_row, level_rows, pareto_csv, stage_rows, value_text
from tuner.searches.best import BestTrial, best_yaml, close_calls_text
from tuner.searches.cost import COLUMNS, row_texts, trade_text
from tuner.searches.facts import gpus_text, ranks_text, rounded
from tuner.searches.front import UNDECIDED
from tuner.searches.store import ResultsFolder, write_atomically
from tuner.searches.view import SHOWN_LEVELS, Kind, View, levels

if TYPE_CHECKING:
    from tuner.cost.step_details import MemoryTimeline


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
    numbers = view.numbers
    rows: dict[str, list[_Point]] = {}
    for name, column in zip(view.knobs, columns, strict=False):  # no column without a record
        points = _points(view, name, column, numbers)
        if sum(len(point.values) for point in points) > 1:
            rows[name] = points
    return _figure(rows) if rows else None


def _points(
    view: View,
    name: str,
    column: Sequence[KnobValue | None],
    numbers: Sequence[tuple[int, float] | None],
) -> list[_Point]:
    """The points of a parameter by throughput; values that are equally fast share one."""
    fastest: dict[KnobValue, float] = {}
    for value, found, kind in zip(column, numbers, view.kinds, strict=True):
        if value is not None and found and kind in _FITTING:
            fastest[value] = max(found[1], fastest.get(value, 0.0))
    alike: dict[str, list[KnobValue]] = {}
    words = {value: isinstance(value, str | tuple) for value in fastest}  # behind all numbers
    for value in sorted(fastest, key=lambda v: (words[v], value_text(v) if words[v] else v)):
        alike.setdefault(significant(fastest[value]), []).append(value)
    best = view.best.configuration.get(name) if view.best else None
    points = [
        _Point(rounded(fastest[values[0]]), tuple(map(value_text, values)), best in values)
        for values in alike.values()
    ]
    step = -(-len(points) // MAX_POINTS)
    return sorted(points, key=lambda point: point.samples_per_s)[::-step][::-1] if points else []


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


MEMORY_COLORS: Mapping[str, str] = {
    MemoryCategory.WEIGHTS: "#4f7cd6",
    MemoryCategory.ADAPTERS: "#22a6b3",
    MemoryCategory.GRADIENTS: "#8e6bd1",
    MemoryCategory.UNSHARDED_GRADIENTS: "#b9a5e8",
    MemoryCategory.OPTIMIZER_STATE: "#c65fa8",
    MemoryCategory.ACTIVATIONS: "#e2873b",
    MemoryCategory.LOGITS_AND_LOSS: "#d9534f",
    MemoryCategory.TEMPORARY: "#b9a03a",
    MemoryCategory.ALLOCATOR_OVERHEAD: "#8a94a6",
    MemoryCategory.CONTEXT_AND_WORKSPACE: "#64707f",
}
_MORE_COLORS = tuple(MEMORY_COLORS.values())
MAX_FRONT_ROWS = 60
LEAST_SHOWN_BYTES = MIB // 20
"""Smaller sizes would be shown as 0.0 MiB."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One piece of a stacked bar. `percent` is of the whole bar; no colour is free space."""

    label: str
    text: str
    percent: float
    color: str | None


def report_html(view: View, *, timeline: MemoryTimeline | None = None) -> str:
    """The report as HTML text. Every name in it is shown as text, whatever it contains.

    `timeline` is the memory of the recommended configuration over a step, where it is known. The
    page asks nothing of the network, and its content security policy forbids it to.
    """
    every_level = levels(view)
    across, up = map(axis_title, axes_of(view))
    title = f"{up[:1].upper()}{up[1:]} against {across}"
    seen: dict[str, set[str]] = {}
    for name, version in (pair for r in view.records for pair in r.versions.items()):
        seen.setdefault(name, set()).add(version)
    more = {
        "timeline": timeline_figure(timeline, view.best.memory_bytes, MEMORY_COLORS)
        if timeline and view.best
        else None,
        "knobs": knobs_figure(view),
    }
    page = {
        "trials": all_shown(_trials(view)),
        "figures": {
            "front": front_figure(view),
            **{name: figure for name, figure in more.items() if figure},
        },
    }
    # Nothing in an inlined script may close its element.
    library = Markup(plotlyjs().replace("</script", "<\\/script"))  # noqa: S704
    text: str = (
        page_environment()
        .get_template("report.html.j2")
        .render(
            view=view,
            best=view.best,
            tiles=_tiles(view.best) if view.best else [],
            gpus=gpus_text(view.best.configuration, view.gpu)
            if view.best and view.best.gpus > 1
            else "",
            subtitle=subtitle(view),
            undecided=UNDECIDED if view.undecided else "",
            close_calls=close_calls_text(view.best) if view.best else "",
            gpu_columns=COLUMNS,
            row_texts=row_texts,
            trade_text=trade_text,
            memory_parts=_memory_parts(view.best) if view.best else [],
            time_parts=_time_parts(view.best) if view.best else [],
            operators=timeline.operators if timeline and view.best else (),
            front_rows=[front_row(view, r) for r in view.front[-MAX_FRONT_ROWS:]],
            levels=level_rows(view, every_level[:SHOWN_LEVELS]),
            level_count=len(every_level),
            stages=stage_rows(view),
            front_title=title if not view.is_default else "Throughput against memory",
            page=page,
            use_commands=view.use,
            runs=_runs(view),
            versions=[(name, ", ".join(sorted(found))) for name, found in sorted(seen.items())],
            plotlyjs=library,
            value_text=value_text,
            format_duration=format_duration,
            format_gib=format_gib,
        )
    )
    return text


def _tiles(best: BestTrial) -> list[tuple[str, str, str]]:
    """The facts at the top: what, the number, and one line about it."""
    memory, speed, limit = best.evidence.memory, best.evidence.speed, best.memory_bytes
    share = memory.device_bytes / limit
    tokens = f"{significant(speed.tokens_per_s)} tokens/s, " if speed.tokens_per_s else ""
    per_step = f"{tokens}{format_duration(speed.step_s)} per optimizer step"
    rate, size = best.samples_per_s_interval, best.device_bytes_interval
    per_step += f"; {rate.text(significant)}" if rate else ""
    around = f"; {size.text(format_size)}" if size else ""
    stage = best.evidence.limiting_stage
    limits = f"; {stage} is the hardest of {len(best.evidence.stages)} stages" if stage else ""
    ranks = ranks_text(best.evidence)
    around += f"; by rank {ranks}" if ranks else ""
    tiles = [
        ("Throughput", f"{significant(speed.samples_per_s)} samples/s", per_step),
        (
            "Peak device memory",
            format_size(memory.device_bytes),
            f"{share:.0%} of {format_gib(limit)}{' on each' * (best.gpus > 1)}, "
            f"{format_gib(best.free_bytes)} free{limits}{around}",
        ),
    ]
    cost = best.cost
    if cost is not None:
        run = f"{cost.examples:,} examples" + (f" in {cost.stages} stages" if cost.stages else "")
        if cost.run_s is not None:
            run += f"; {format_duration(cost.run_s)} for {cost.epochs_text}"
        tiles.append(("Time per epoch", format_duration(cost.epoch_s), run))
        if cost.epoch_usd is not None:
            price = f"at {cost.price_usd_per_hour:.2f} USD per hour"
            price += f" for each of {cost.gpus} GPUs" if cost.gpus > 1 else ""
            price += f" ({cost.price_date})" if cost.price_date else ""
            tiles.append(("Cost per epoch", f"{cost.epoch_usd:,.2f} USD", price))
    gain = best.gain
    if gain is not None:
        if gain.speedup is not None:
            note = "in samples/s" + ("" if gain.baseline_fits else "; the baseline does not fit")
            tiles.append(("Against the baseline", f"{gain.speedup:.2f} x", note))
        elif not gain.baseline_fits:
            tiles.append(("Against the baseline", "fits", "the baseline does not fit"))
    return tiles


def _memory_parts(best: BestTrial) -> list[_Part]:
    """The peak by category, then what stays free, as parts of the GPU's memory."""
    memory, limit = best.evidence.memory, best.memory_bytes
    # A device does not tell what its memory is used for.
    known = memory.breakdown or {"in use": memory.device_bytes}
    parts = [
        _Part(_words(name), format_size(size), 100 * size / limit, _color(index, name))
        for index, (name, size) in enumerate(known.items())
        if size >= LEAST_SHOWN_BYTES
    ]
    free = best.free_bytes
    return [*parts, _Part("free", format_gib(free), 100 * free / limit, None)]


def _time_parts(best: BestTrial) -> list[_Part]:
    """The time of one optimizer step by kind of work."""
    speed = best.evidence.speed
    return [
        _Part(_words(name), format_duration(time_s), 100 * time_s / speed.step_s, _color(index, ""))
        for index, (name, time_s) in enumerate(speed.breakdown_s.items())
        if time_s > 0
    ]


def _color(index: int, name: str) -> str:
    return MEMORY_COLORS.get(name) or _MORE_COLORS[index % len(_MORE_COLORS)]


def _words(name: str) -> str:
    return str(name).replace("_", " ")


def _trials(view: View) -> dict[str, Any]:
    """The table of all trials: its columns, and each trial's values and way of drawing.

    What people look for comes first: the screen of a telephone has room for three columns.
    """
    first, more = ["device GiB", "samples/s", "verdict"], ["tokens/s", "step s"]
    columns = [*first, *view.knobs, *more, "outcome", "source", "trial"]
    columns += ["hardest stage"] if view.space.stages else []
    named = labels(view)
    return {
        "columns": columns,
        "knobs": len(view.knobs),
        "rates": [columns.index(name) for name in ("samples/s", "tokens/s")],
        "kinds": [str(kind) for kind in view.kinds],
        "labels": {str(kind): label for kind, label in named.items()},
        "rows": [
            _trial_row(view, record, named[kind])
            for record, kind in zip(view.records, view.kinds, strict=True)
        ],
    }


def _trial_row(view: View, record: TrialRecord, verdict: str) -> list[object]:
    evidence, outcome = record.outcome.evidence, record.outcome
    # Numbers stay numbers, so that a column sorts by size; the rest becomes words.
    values = record.configuration.values_of(view.knobs)
    settings = [v if type(v) in (int, float) else value_text(v) for v in values]
    first: list[object] = [None, None]
    more: list[object] = [None, None]
    if evidence is not None:
        size, speed = evidence.memory.device_bytes, evidence.speed
        first = [round(size / GIB, 2 if size > GIB else 4), float(f"{speed.samples_per_s:.5g}")]
        more = [float(f"{speed.tokens_per_s:.5g}"), float(f"{speed.step_s:.5g}")]
    ended = str(outcome.status) + (f" in {outcome.phase}" if outcome.phase else "")
    ended += f", {outcome.stage} alone" if outcome.stage else ""
    source = str(evidence.source) if evidence else ""
    stage = [outcome.limiting_stage or ""] if view.space.stages else []
    return [*first, verdict, *settings, *more, ended, source, record.trial_id, *stage]


def _runs(view: View) -> list[tuple[str, str]]:
    """Facts about how the trials came to be, each a name and a value."""
    records = view.records
    starts = sorted(r.started_at for r in records)
    devices = {name for r in records if (name := _device_text(r))}
    emulated = {r.emulated_device for r in records if r.emulated_device}
    checks = {r.verified_by.emulated_device for r in records if r.verified_by}
    methods = {r.outcome.prediction.method for r in records if r.outcome.prediction is not None}
    facts = {
        "search space": view.space.name,
        "model": view.space.model or "",
        "GPU": f"{view.gpu.name} ({view.gpu.id}), {format_gib(view.gpu.memory_bytes)}",
        "measured on": ", ".join(sorted(devices)),
        "emulated": ", ".join(sorted(emulated)),
        "verified on an emulated": ", ".join(sorted(filter(None, checks))),
        "predicted by": "; ".join(sorted(methods)),
        "searcher": ", ".join(sorted({r.searcher for r in records})),
        "seed": ", ".join(map(str, sorted({r.seed for r in records}))),
        "trials started": f"{starts[0]} to {starts[-1]}" if starts else "",
        "conditions": all_of(view.conditions),
        "same in every trial": ", ".join(f"{k}={value_text(v)}" for k, v in view.fixed.items()),
    }
    return [(name, value) for name, value in facts.items() if value]


def _device_text(record: TrialRecord) -> str:
    """The real device of a trial that ran, with the memory that it was allowed of it."""
    measurement = record.outcome.measurement
    name = record.device or (measurement.device if measurement else "")
    if name and record.memory_limit_bytes is not None:
        return f"{name}, at most {format_gib(record.memory_limit_bytes)} of it"
    return name


def write_view(folder: ResultsFolder, view: View, *, timeline_of: TimelineOf | None = None) -> None:
    """Write table, best, picture and report of what `view` shows.

    `timeline_of` works out the memory over a step of what is recommended.

    The small files come first. Each replaces its predecessor in one step, so whoever reads, and
    whoever interrupts, finds whole files. Raises `UnavailableError` when the disk refuses one.
    """
    write_atomically(folder.pareto_csv, pareto_csv(view))
    text = best_yaml(
        view.best,
        view.space,
        view.gpu,
        trials=len(view.records),
        command=view.command,
        notes=view.notes,
    )
    write_atomically(folder.best_yaml, text)
    write_atomically(folder.pareto_png, pareto_png(view))
    timeline = None
    if view.best is not None and timeline_of is not None:
        timeline = load_or_trace(folder.memory_timeline, view.best, timeline_of)
        if timeline is not None:
            write_atomically(folder.memory_timeline, timeline_json(timeline, view.best))
    write_atomically(folder.report_html, report_html(view, timeline=timeline))


def page_environment() -> Environment:
    """The templates of `page/`. Every text is shown as text, whatever it contains.

    Pages ask nothing of the network, and the content security policy in their head forbids it.
    """
    environment = Environment(
        loader=PackageLoader("tuner.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    # Of 100,000 trials, the standard library takes a second longer.
    environment.policies["json.dumps_function"] = lambda value, **_: encode(value).decode()
    return environment


def _shown(value: Any) -> Any:
    """`value` without characters that turn the direction of writing or hide text."""
    # Markup is the page's own.
    return printable(value) if type(value) is str else value


def all_shown(value: Any) -> Any:
    """`value` with every text in it safe to show, in lists and mappings too."""
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, dict):
        return {_shown(name): all_shown(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [all_shown(item) for item in value]
    return value


VERSION = "4.1.1"
"""Version of the bundle; its major version is that of the Python package's plotly.js."""
SHA256 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
"""Checksum of the published `plotly-basic.min.js`."""


def plotlyjs() -> str:
    """The bundle as JavaScript text; its first lines name its version and licence (MIT)."""
    return (files("tuner.report") / "page/vendor/plotly-basic.min.js").read_text("utf-8")
