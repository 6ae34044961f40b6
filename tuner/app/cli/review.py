"""`tuner review`: whether the training programs that a branch changes still fit their GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from tuner.app.cli.options import json_option, margin_option, subcommand
from tuner.core.errors import InputError
from tuner.report.terminal.progress import Waiting
from tuner.report.terminal.render import echo, print_json
from tuner.searches.store import utf8, write_atomically
from tuner.space.gpus import get_gpu

_FORMATS = (".md", ".sarif")


@subcommand(
    "review",
    "tuner review --base main",
    "tuner review --base main --gpu rtx4090 --gpu a100_80gb",
    "tuner review --base main --write review.md --write review.sarif",
    "tuner review train.py --gpu t4",
)
@click.option(
    "--base",
    envvar="PRE_COMMIT_FROM_REF",
    default="HEAD",
    show_default=True,
    metavar="COMMIT",
    help="Branch or commit to compare with.",
)
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="TYPE",
    help="GPU type to fit. Can be repeated.  [default: that of the project]",
)
@margin_option
@click.option(
    "--write",
    "paths",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write Markdown (.md) or SARIF (.sarif). Can be repeated.",
)
@click.option(
    "--annotate", is_flag=True, help="Print findings as annotations of a GitHub workflow."
)
@click.option("--quiet", is_flag=True, help="Print findings only.")
@json_option
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
def command(  # noqa: PLR0913 - one argument for each option
    *,
    files: tuple[Path, ...],
    base: str,
    gpus: tuple[str, ...],
    margin: str | None,
    paths: tuple[Path, ...],
    annotate: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Check whether the training programs that differ from --base still fit their GPUs.

    Predicts the programs in the tracked files that changed, or in FILES, and those that import
    them. Names the settings that changed with their lines, and the memory that they add. Nothing
    of your programs is run. GPU types, margin and models are those of [tool.tuner] in
    pyproject.toml, or of tuner.toml.

    Exit codes: 0 all fit, 1 one doesn't, 2 bad input, 4 one is unknown.
    """
    from tuner.app.changed_files import find_changes
    from tuner.app.cli.review_text import annotated, markdown, print_review, sarif  # numpy
    from tuner.app.project import read_project, require_gpus
    from tuner.app.review import review

    for path in paths:
        if path.suffix not in _FORMATS:
            raise InputError(f"--write {path}: the suffix is one of {', '.join(_FORMATS)}")
    changes = find_changes(Path(), base, files)
    project = read_project(changes.root)
    project = replace(project, gpus=gpus or project.gpus, margin=margin or project.margin)
    require_gpus(project)
    types = [get_gpu(name) for name in project.gpus]
    with Waiting(quiet=quiet) as waiting:
        found = review(changes, project, types, report=waiting)
    for path in paths:
        written = sarif(found) if path.suffix == ".sarif" else markdown(found)
        write_atomically(path, utf8(written))
    if as_json:
        print_json(found.to_dict())
    else:
        print_review(found, quiet=quiet)
        for line in annotated(found) if annotate else ():
            echo(line)
    raise click.exceptions.Exit(found.exit_code)
