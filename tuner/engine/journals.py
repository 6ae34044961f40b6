"""The journal of a search: what it holds already, and where new records go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tuner.engine.plan import Plan
from tuner.engine.target import comparable, with_margin
from tuner.records import TrialRecord

if TYPE_CHECKING:
    from tuner.results.journal import JournalWriter


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
