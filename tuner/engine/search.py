"""Searches one GPU type: reads the journal, runs what is missing, writes every result.

Nothing is written, and Ray is not started, before all that can be checked has been checked.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tuner.engine.course import course_of
from tuner.engine.listener import SILENT, Listener
from tuner.engine.plan import Plan
from tuner.engine.prepare import Prepared, prepare
from tuner.engine.target import comparable, stale, stale_text, with_margin
from tuner.records import TrialRecord

if TYPE_CHECKING:
    from tuner.results.journal import JournalWriter
    from tuner.results.view import View
    from tuner.tune.request import SearchResult


@dataclass(frozen=True, slots=True)
class Found:
    """What a search of one GPU type came to: its trials, and what its files show."""

    plan: Plan
    result: SearchResult
    view: View


def run_plan(plan: Plan, *, command: str, listener: Listener = SILENT) -> Found:
    """Search as `plan` says; `command` is how the report tells to do it again."""
    with journal_of(plan) as (writer, known):
        listener.planned(plan, known)
        prepared = prepare(plan, known, listener)
        from tuner.tune.driver import search  # Ray and Optuna: seconds to import

        with listener.searching() as report:
            result = search(prepared.request, on_progress=report, on_record=writer.append)
    return Found(plan, result, write(plan, prepared, result, command=command))


@contextlib.contextmanager
def journal_of(plan: Plan) -> Iterator[tuple[JournalWriter, tuple[TrialRecord, ...]]]:
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


def write(plan: Plan, prepared: Prepared, result: SearchResult, *, command: str) -> View:
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
        command=command,
        notes=notes,
        course_of=functools.partial(course_of, plan),
    )
