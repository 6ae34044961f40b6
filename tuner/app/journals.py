"""The journal of a search: what it holds already, and where new records go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tuner.app.plan import SearchPlan
from tuner.app.plausible import say
from tuner.app.target import sorted_by_use, with_margin
from tuner.core.records import TrialRecord
from tuner.searches.journal import JournalWriter, read_journal
from tuner.searches.store import ResultsFolder


@contextlib.contextmanager
def journal_of(plan: SearchPlan) -> Iterator[tuple[JournalWriter, tuple[TrialRecord, ...]]]:
    """The journal to append to, and what it holds already.

    Known predictions are appended again when another margin is asked for: whether they fit
    then changes, and the last line of a configuration counts. Where nothing was appended, no
    empty journal stays behind.
    """
    folder = plan.target.folder
    if plan.options.fresh:
        _set_aside(plan)
    existed = [path for path in (folder.path, *folder.path.parents) if path.exists()]
    with folder.writer() as writer:
        # Under the lock: one who is refused must not take the file of the one who writes.
        try:
            known = []
            found = sorted_by_use(folder.read().records, plan.target)
            say(found.aside)
            for record in found.comparable:
                changed = with_margin(record, plan.margin_bytes)
                if changed != record:
                    writer.append(changed)
                known.append(changed)
            _change_margin(plan)
            yield writer, tuple(known)
        finally:
            with contextlib.suppress(OSError):  # removed by somebody, or read-only meanwhile
                _remove_empty(folder, existed)


def _change_margin(plan: SearchPlan) -> None:
    """Judge anew what was predicted under another margin."""
    folder = plan.target.folder
    if plan.options.fresh or not folder.predicted.exists():
        return
    before = read_journal(folder.predicted).records
    after = tuple(with_margin(record, plan.margin_bytes) for record in before)
    if after != before:
        folder.write_predicted(after)


def _remove_empty(folder: ResultsFolder, existed: Sequence[Path]) -> None:
    """Remove the journal if nothing is in it, and the folders that were made for it."""
    if folder.journal.stat().st_size:
        return
    folder.journal.unlink()
    for path in (folder.path, *folder.path.parents):
        if path in existed:
            break
        path.rmdir()  # refused where something is in it


def _set_aside(plan: SearchPlan) -> None:
    """Rename the journal of earlier searches, so that this one begins anew and nothing is lost."""
    journal = plan.target.folder.journal
    if not journal.exists():
        return
    with plan.target.folder.writer():  # nobody else is writing
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
        kept = journal.with_name(f"trials-{stamp}.jsonl")
        while kept.exists():  # the clock was set back, and renaming would replace it
            kept = kept.with_name(f"{kept.stem}_{kept.suffix}")
        journal.rename(kept)
