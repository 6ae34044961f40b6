"""`tuner report-run`: measured trials as rows for a pull request."""

from __future__ import annotations

import json

import click

from tuner.app.cli.options import examples
from tuner.app.cli.target_options import Selected, target_options
from tuner.app.search.result_files import reported_runs
from tuner.report.terminal.render import echo


@click.command(
    "report-run",
    epilog=examples(
        "tuner report-run --space tiny_cpu --gpu cpu",
        "tuner report-run --space tiny_cpu --gpu cpu >> reported_runs.jsonl",
    ),
)
@target_options("The --model of the search.")
def command(*, selected: Selected) -> None:
    """Print measured trials as rows to give away: predicted numbers beside measured ones.

    One line of JSON for each measured configuration, the fastest first: the model's public name,
    the GPU, the knobs, the versions, memory and time. No path, no name of a space or a machine, no
    date. A pull request that adds the lines to benchmarks/reported_runs.jsonl improves the
    predictions of everybody. Exit code 3 if nothing was measured.
    """
    rows = reported_runs(selected.target())
    for row in rows:
        echo(json.dumps(row))
    plural = "s" if len(rows) > 1 else ""
    echo(f"{len(rows)} measured configuration{plural}; nothing was sent", err=True)
