"""What `tuner search` does: check everything, say the plan, search, write, print the answer.

Nothing is written, and Ray is not started, before all that can be checked has been checked.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from tuner.cli.course import course_of
from tuner.cli.dry_run import dry_run
from tuner.cli.progress import reporting
from tuner.cli.quiet import quiet_libraries
from tuner.cli.search_plan import Plan, SearchOptions, make_plan
from tuner.cli.search_request import Prepared, prepare
from tuner.cli.search_text import print_answer, print_plan
from tuner.cli.target import Target, comparable, stale, stale_text, with_margin
from tuner.errors import EXIT_FOUND, EXIT_INTERRUPTED, EXIT_NOTHING_FITS
from tuner.records import TrialRecord

if TYPE_CHECKING:
    from tuner.results.journal import JournalWriter
    from tuner.results.view import View
    from tuner.tune.request import SearchResult


def run_search(target: Target, options: SearchOptions) -> int:
    """The whole command; returns its exit code."""
    with quiet_libraries():
        plan = make_plan(target, options)
        if options.dry_run:
            return dry_run(plan)
        with _journal(plan) as (writer, known):
            prepared, result = _search(plan, writer, known)
        view = _write(plan, prepared, result)
    print_answer(plan, result, view)
    if result.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FOUND if view.best is not None else EXIT_NOTHING_FITS


@contextlib.contextmanager
def _journal(plan: Plan) -> Iterator[tuple[JournalWriter, tuple[TrialRecord, ...]]]:
    """The journal to append to, and what it holds already.

    Known predictions are appended again when another margin is asked for: whether they fit
    then changes, and the last line of a configuration counts. Where nothing was appended, no
    empty journal stays behind.
    """
    folder = plan.target.folder
    if plan.options.fresh:
        _set_aside(plan)
    existed = [path for path in (folder.path, *folder.path.parents) if path.exists()]
    try:
        with folder.writer() as writer:
            known = []
            for record in comparable(folder.read().records, plan.target):
                changed = with_margin(record, plan.margin_bytes)
                if changed != record:
                    writer.append(changed)
                known.append(changed)
            yield writer, tuple(known)
    finally:
        if folder.journal.exists() and not folder.journal.stat().st_size:
            folder.journal.unlink()
            for path in (folder.path, *folder.path.parents):
                if path in existed or any(path.iterdir()):
                    break
                path.rmdir()


def _set_aside(plan: Plan) -> None:
    """Rename the journal of earlier searches, so that this one begins anew and nothing is lost."""
    journal = plan.target.folder.journal
    if not journal.exists():
        return
    with plan.target.folder.writer():  # nobody else is writing
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
        journal.rename(journal.with_name(f"trials-{stamp}.jsonl"))


def _search(
    plan: Plan, writer: JournalWriter, known: tuple[TrialRecord, ...]
) -> tuple[Prepared, SearchResult]:
    if not plan.options.quiet:
        print_plan(plan, known)
    prepared = prepare(plan, known)
    from tuner.tune.driver import search  # Ray and Optuna: seconds to import

    options = plan.options
    with reporting(err=options.as_json, quiet=options.quiet) as report:
        found = search(prepared.request, on_progress=report, on_record=writer.append)
    return prepared, found


def _write(plan: Plan, prepared: Prepared, result: SearchResult) -> View:
    """Write every file of the results folder, and return what they show."""
    target = plan.target
    found = target.folder.read().records
    records = comparable(found, target) or result.records
    old = stale_text(stale(found, target), records)
    used = f" (hints for this search: {result.stale})" if result.stale else ""
    notes = [*prepared.notes, *([f"{old} left out{used}"] if old else [])]
    from tuner.results.pruned import write_pruned

    if result.pruned or len(result.records) > result.reused:  # else nothing was judged anew
        write_pruned(target.folder, result.pruned)
    return target.folder.write_all(
        [with_margin(record, plan.margin_bytes) for record in records],
        plan.facts,
        target.gpu,
        where=plan.meets,
        conditions=plan.all_conditions,
        command=_command_line(),
        notes=notes,
        course_of=functools.partial(course_of, plan),
    )


def _command_line() -> str:
    """What was typed, for the report; the plain command where this is not the program."""
    context = click.get_current_context(silent=True)
    arguments = context.find_root().obj if context is not None else None
    return shlex.join(["tuner", *(arguments or sys.argv[1:])])
