"""`tuner calculator`: a page that predicts in the browser."""

from __future__ import annotations

from pathlib import Path

import click

from tuner.app.cli.options import subcommand
from tuner.report.terminal.render import print_fields
from tuner.searches.store import write_atomically


@subcommand("calculator", "tuner calculator --output calculator.html")
@click.option(
    "--output",
    "path",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    default="calculator.html",
    show_default=True,
    metavar="FILE",
    help="Page to write.",
)
def command(*, path: Path) -> None:
    """Write a page with a form for model, GPU and settings, which answers as `tuner estimate` does.

    The page is one file that needs no server and no network. It has the models and settings whose
    timelines come with tuner, and all GPU types.
    """
    from tuner.app.calculator import calculator_html  # numpy, jinja2
    from tuner.predict.shipped import shipped

    write_atomically(path, calculator_html(shipped()))
    print_fields([("written", str(path))])
