"""`tuner report`: the files of a search drawn again from its journal."""

from __future__ import annotations

import click

from tuner.app.cli.options import examples, json_option, where_option
from tuner.app.cli.target_options import Selected, target_options
from tuner.app.search.result_files import redraw
from tuner.core.errors import EXIT_FOUND, EXIT_NOTHING_FITS
from tuner.report.terminal.render import print_fields, print_json


@click.command(
    "report",
    epilog=examples(
        "tuner report --space qlora27b --gpu a6000 --open",
        "tuner report --space qlora27b --gpu a6000,t4    # or all, beside each other",
    ),
)
@target_options("The --model of the search.")
@where_option
@click.option("--open", "is_opened", is_flag=True, help="Open the report in a browser.")
@json_option
def command(
    *,
    selected: Selected,
    where: tuple[str, ...],
    is_opened: bool,
    as_json: bool,
) -> int:
    """Rewrite report.html, pareto.png, pareto.csv and best.yaml from the journal.

    Runs no trial. Without --where, the search's conditions stay. --gpu all draws every searched GPU
    type, --gpu a6000,t4 the named ones; each report shows the others too. Exit code 1 if nothing
    tried fits.
    """
    targets = selected.targets()
    views = redraw(targets, where)
    files = [target.folder.report_html for target in targets]
    if as_json:
        print_json(
            [
                {"gpu": view.gpu.id, "report": str(path), "trials": len(view.records)}
                for view, path in zip(views, files, strict=True)
            ]
        )
    else:
        print_fields([(view.gpu.id, str(path)) for view, path in zip(views, files, strict=True)])
    if is_opened:
        click.launch(str(files[0]))
    return EXIT_FOUND if any(view.best for view in views) else EXIT_NOTHING_FITS
