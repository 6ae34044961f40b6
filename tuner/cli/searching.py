"""What `tuner search` does: plan, say so, search, print the answer."""

from __future__ import annotations

import shlex
import sys

import click

from tuner.cli.dry_run import dry_run
from tuner.cli.listening import Printer
from tuner.cli.search_text import print_answer
from tuner.engine.plan import SearchOptions, make_plan
from tuner.engine.quiet import quiet_libraries
from tuner.engine.search import run_plan
from tuner.engine.target import Target
from tuner.errors import EXIT_FOUND, EXIT_INTERRUPTED, EXIT_NOTHING_FITS


def run_search(
    target: Target, options: SearchOptions, *, as_json: bool, quiet: bool, dry: bool
) -> int:
    """The whole command; returns its exit code."""
    printer = Printer(err=as_json, quiet=quiet)
    with quiet_libraries():
        plan = make_plan(target, options, printer)
        if dry:
            return dry_run(plan, printer, as_json=as_json)
        found = run_plan(plan, command=_command_line(), listener=printer)
    print_answer(found, as_json=as_json)
    if found.result.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FOUND if found.view.best is not None else EXIT_NOTHING_FITS


def _command_line() -> str:
    """What was typed, for the report; the plain command where this is not the program."""
    context = click.get_current_context(silent=True)
    arguments = context.find_root().obj if context is not None else None
    return shlex.join(["tuner", *(arguments or sys.argv[1:])])
