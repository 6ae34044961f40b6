"""What `tuner search` does: plan, say so, search, print the answer."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import click

from tuner.app.cli.dry_run import dry_run
from tuner.app.cli.listening import Printer
from tuner.app.cli.search_text import print_answer, print_answers
from tuner.app.listener import quiet_libraries
from tuner.app.search.plan import SearchOptions, make_plans
from tuner.app.search.run import SearchedGpu, run_plans
from tuner.app.target import Target
from tuner.core.errors import EXIT_FOUND, EXIT_INTERRUPTED, EXIT_NOTHING_FITS


def run_search(
    targets: Sequence[Target], options: SearchOptions, *, as_json: bool, quiet: bool, dry: bool
) -> int:
    """The whole command; returns its exit code."""
    printer = Printer(err=as_json, quiet=quiet)
    with quiet_libraries():
        plans = make_plans(targets, options, printer)
        if dry:
            return dry_run(plans, printer, as_json=as_json)
        found = run_plans(plans, command=_command_line(), listener=printer)
    ran = [one for one in found if isinstance(one, SearchedGpu)]
    if len(found) == 1:
        print_answer(ran[0], as_json=as_json)
    else:
        print_answers(found, as_json=as_json)
    if any(one.result.interrupted for one in ran):
        return EXIT_INTERRUPTED
    if any(one.view.best for one in ran):
        return EXIT_FOUND
    # A search that broke off does not know that nothing fits.
    failures = [one.result.failure for one in ran if one.result.failure is not None]
    return failures[0].exit_code if failures else EXIT_NOTHING_FITS


def _command_line() -> str:
    """What was typed, for the report; the plain command where this is not the program."""
    context = click.get_current_context(silent=True)
    arguments = context.find_root().obj if context is not None else None
    return shlex.join(["tuner", *(arguments or sys.argv[1:])])
