"""Results in a notebook, in rich and in pandas, and the progress of a search.

The HTML has no script and loads nothing: the picture is part of it. Text from files (names,
settings, notes) is escaped.
"""

from __future__ import annotations

import base64
import contextlib
import html
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from tuner.app.checking import CheckedProgram
from tuner.app.cli.answers import GPU_NUMBERS, gpu_cells
from tuner.app.cli.checked_text import answer_fields, checked_lines
from tuner.app.cli.listening import Printer
from tuner.app.listener import Listener, Searching
from tuner.app.recommendation import Recommended
from tuner.app.search.plan import SearchPlan
from tuner.core.errors import UnavailableError
from tuner.core.expressions import settings_text
from tuner.core.records import TrialRecord, Verdict
from tuner.report.plot import pareto_png
from tuner.report.table import numbers_of, value_text
from tuner.report.terminal.front import MAIN_NUMBERS, front_numbers
from tuner.report.terminal.render import differing
from tuner.report.terminal.verdict import ANSWER, CHANGE, NOTE, READ_AS
from tuner.searches.progress import Progress
from tuner.searches.view import Kind, View

if TYPE_CHECKING:
    import pandas


ROWS = 20
"""Rows of a front that are shown; all are in `front`."""


def front_rows(view: View) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the front: the recommended one has a star, then numbers and settings."""
    names = view.space.knobs or view.knobs
    varying, _ = differing(names, [record.configuration for record in view.front])
    best = view.best and view.best.configuration
    rows = [
        [
            "*" if record.configuration == best else "",
            *front_numbers(record, view)[: len(MAIN_NUMBERS)],
            *(value_text(record.configuration.get(name)) for name in varying),
        ]
        for record in view.front
    ]
    return ["", *MAIN_NUMBERS, *varying], rows


def comparison_rows(answers: Sequence[Recommended]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a comparison of GPU types."""
    rows = []
    for answer in answers:
        best = answer.best
        if best is None:
            rows.append([answer.gpu.id, *[""] * len(GPU_NUMBERS), answer.reason])
            continue
        rows.append([*gpu_cells(answer, best), settings_text(best.configuration, best.names)])
    return ["GPU", *GPU_NUMBERS, "settings"], rows


def result_html(view: View) -> str:
    """The front as a table and as a picture."""
    columns, rows = front_rows(view)
    picture = base64.b64encode(pareto_png(view)).decode("ascii")
    more = f"<p>{len(rows) - ROWS} more are in <code>front</code></p>" if len(rows) > ROWS else ""
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in view.notes)
    return (
        f"<p><b>{html.escape(_title(view))}</b></p>{_html_table(columns, rows[:ROWS])}{more}{notes}"
        f'<img alt="{html.escape(_title(view))}" style="max-width:100%" '
        f'src="data:image/png;base64,{picture}">'
    )


def results_html(answers: Sequence[Recommended], views: Sequence[View]) -> str:
    """The comparison of the GPU types, then the front of each."""
    parts = [f"<p><b>the cheapest epoch first</b></p>{_html_table(*comparison_rows(answers))}"]
    parts += [
        f"<details><summary>{html.escape(view.gpu.name)}</summary>{result_html(view)}</details>"
        for view in views
    ]
    return "".join(parts)


def check_text(checked: CheckedProgram) -> str:
    """The short answer of `tuner check`, without colours."""
    first = answer_fields(checked)[0][1]
    return click.unstyle("\n".join([first, *checked_lines(checked)]))


def check_html(checked: CheckedProgram) -> str:
    """The answer of `tuner check`: the verdict, the change as a diff, numbers and notes."""
    fields = [(label, html.escape(text)) for label, text in answer_fields(checked) if text]
    words, _, rest = fields[0][1].partition(": ")
    tint = _TINTS[checked.found.verdict]
    parts = [f'<p><b style="{tint}">&nbsp;{words}&nbsp;</b> {rest}</p>']
    parts += [f"<p>{label} {text}</p>" for label, text in fields if label == READ_AS]
    parts += [f"<p>{text}</p>" for label, text in fields if label == CHANGE]
    if checked.suggestion is not None:
        shown = "".join(
            # Pages of Jupyter give a span the letters of prose.
            f'<span style="display:block;font-family:monospace;{_line_style(line)}">'
            f"{html.escape(line)}</span>"
            for line in checked.suggestion.change.difference.splitlines()
            if not line.startswith("+++ ")  # the name once more
        )
        parts.append(f'<pre style="line-height:1.35">{shown}</pre>')
    cell = '<td style="text-align:left;white-space:normal">'
    body = "".join(
        f"<tr>{cell}{label}</td>{cell}{text}</td></tr>"
        for label, text in fields
        if label not in (ANSWER, READ_AS, CHANGE, NOTE)
    )
    parts.append(f'<table style="color:inherit"><tbody>{body}</tbody></table>')
    notes = [text for label, text in fields if label == NOTE]
    is_open = " open" if any(not note.startswith("assumed: ") for note in notes) else ""
    items = "".join(f"<li>{note}</li>" for note in notes)
    if items:
        parts.append(f"<details{is_open}><summary>notes</summary><ul>{items}</ul></details>")
    return "".join(parts)


# Tints behind text in the colour of the page can be read in a light and in a dark theme.
_GREEN, _RED = "background:rgba(46,160,67,.3)", "background:rgba(248,81,73,.3)"
_TINTS = {
    Verdict.FITS: _GREEN,
    Verdict.TIGHT: "background:rgba(210,153,34,.35)",
    Verdict.DOES_NOT_FIT: _RED,
    Verdict.UNKNOWN: "background:rgba(163,113,247,.3)",
}


def _line_style(line: str) -> str:
    if line.startswith("--- "):
        return "font-weight:bold"
    return {"+": _GREEN, "-": _RED}.get(line[:1], "")


def _title(view: View) -> str:
    text = f"{view.space.name} on {view.gpu.name}: {len(view.records):,} configurations"
    if not view.front:
        return f"{text}, nothing fits ({view.source})"
    return f"{text}, {len(view.front)} on the front ({view.source}), * recommended"


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def frame_of(view: View) -> pandas.DataFrame:
    """A row for each trial of `view`, in its order."""
    return _pandas().DataFrame(
        [
            _trial_row(record, kind, view)
            for record, kind in zip(view.records, view.kinds, strict=True)
        ]
    )


def joined(frames: Sequence[pandas.DataFrame]) -> pandas.DataFrame:
    """All rows, numbered anew."""
    return _pandas().concat(frames, ignore_index=True) if frames else _pandas().DataFrame()


def _trial_row(record: TrialRecord, kind: Kind, view: View) -> dict[str, Any]:
    row: dict[str, Any] = {
        "gpu": record.gpu,
        "trial_id": record.trial_id,
        "source": str(record.source),
        "status": str(record.outcome.status),
        "fits": record.fits,
        "on_front": kind in (Kind.FRONT, Kind.BEST),
        "recommended": kind is Kind.BEST,
        **{name: record.configuration.get(name) for name in (*view.knobs, *view.fixed)},
    }
    return row | numbers_of(record, view) if record.outcome.evidence is not None else row


def _pandas() -> Any:
    try:
        import pandas  # a second; it comes with Ray Tune
    except ImportError as error:
        raise UnavailableError(
            "pandas is not installed", hint="pip install pandas, or read `records`"
        ) from error
    return pandas


OnProgress = Callable[[Mapping[str, "Progress"]], None]


def listener_of(shown: bool | None, on_progress: OnProgress | None) -> Listener:
    """The listener that shows progress if `shown`, and calls `on_progress`.

    With None, progress is shown in a notebook and in a terminal.
    """
    err = Console(stderr=True)
    is_shown = bool(shown or (shown is None and (err.is_jupyter or err.is_terminal)))
    # A notebook paints stderr as if something were wrong.
    return _ProgramListener(on_progress, is_shown=is_shown, err=not err.is_jupyter)


class _ProgramListener(Printer):
    """Passes on how far a search is; what was planned is in the result already."""

    def __init__(self, on_progress: OnProgress | None, *, is_shown: bool, err: bool) -> None:
        super().__init__(err=err, quiet=not is_shown)
        self._on_progress = on_progress

    def say(self, text: str) -> None:
        """Nothing: the answer holds without it."""

    note = say

    def planned(self, plan: SearchPlan, known: tuple[TrialRecord, ...]) -> None:
        """Nothing."""

    def warn(self, text: str) -> None:
        """As a warning of Python."""
        warnings.warn(text.removeprefix("warning: "), stacklevel=2)

    @contextlib.contextmanager
    def searching(self) -> Iterator[Searching]:
        """Shown, where progress is, and told."""
        with super().searching() as show:

            def report(states: Mapping[str, Progress]) -> None:
                show(states)
                if self._on_progress is not None:
                    self._on_progress(dict(states))

            yield report
