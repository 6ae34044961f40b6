"""Writes the files of a search: table, recommendation, pictures and report."""

from __future__ import annotations

from tuner.report.memory_timeline import TimelineOf, load_or_trace, timeline_json
from tuner.report.plot import pareto_png
from tuner.report.report import report_html
from tuner.report.table import pareto_csv
from tuner.searches.best import best_yaml
from tuner.searches.store import ResultsFolder, utf8, write_atomically
from tuner.searches.view import View


def write_view(folder: ResultsFolder, view: View, *, timeline_of: TimelineOf | None = None) -> None:
    """Write table, best, picture and report of what `view` shows.

    `timeline_of` works out the memory over a step of what is recommended.

    The small files come first. Each replaces its predecessor in one step, so whoever
    reads, and whoever interrupts, finds whole files. Raises `UnavailableError` when the
    disk refuses one.
    """
    write_atomically(folder.pareto_csv, utf8(pareto_csv(view)))
    text = best_yaml(
        view.best,
        view.space,
        view.gpu,
        trials=len(view.records),
        command=view.command,
        notes=view.notes,
    )
    write_atomically(folder.best_yaml, utf8(text))
    write_atomically(folder.pareto_png, pareto_png(view))
    timeline = None
    if view.best is not None and timeline_of is not None:
        timeline = load_or_trace(folder.memory_timeline, view.best, timeline_of)
        if timeline is not None:
            write_atomically(folder.memory_timeline, utf8(timeline_json(timeline, view.best)))
    write_atomically(folder.report_html, utf8(report_html(view, timeline=timeline)))
