"""The files of a search: read before it, written after it, and drawn again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tuner.app.listener import quiet_libraries
from tuner.app.search.plan import SearchPlan
from tuner.app.search.supported import is_predicted
from tuner.app.target import Target, check_conditions, sorted_by_use, usable, warn_of, with_margin
from tuner.core.errors import InputError, TunerError, UnavailableError
from tuner.core.files import read_file
from tuner.core.records import TrialRecord
from tuner.cost.speed.profile import DeviceProfile, find_profile
from tuner.cost.step_details import MemoryTimeline
from tuner.predict.predict import trace_timeline
from tuner.predict.traces import Subject
from tuner.report.memory_timeline import TimelineOf
from tuner.report.report import write_view
from tuner.searches.best import BestTrial
from tuner.searches.facts import SpaceFacts
from tuner.searches.journal import JournalWriter
from tuner.searches.store import ResultsFolder
from tuner.searches.view import View, build_view
from tuner.space import SearchSpace
from tuner.space.gpus import Gpu

MAX_BYTES = 16 * 1024 * 1024
"""A larger `best.yaml` is none."""


@contextlib.contextmanager
def journal_of(plan: SearchPlan) -> Iterator[tuple[JournalWriter, tuple[TrialRecord, ...]]]:
    """The journal to append to, and the comparable records that it holds already.

    Known records are appended again when the margin changed, because the margin decides what fits
    and the last line of a configuration counts. An empty journal is removed afterwards.
    """
    folder = plan.target.folder
    if plan.options.fresh:
        _set_aside(plan)
    existed = [path for path in (folder.path, *folder.path.parents) if path.exists()]
    with folder.writer() as writer:
        # Under the lock: a search that is refused must not remove another writer's file.
        try:
            known = []
            found = sorted_by_use(folder.read().records, plan.target)
            warn_of(found.aside)
            for record in found.comparable:
                changed = with_margin(record, plan.margin_bytes)
                if changed != record:
                    writer.append(changed)
                known.append(changed)
            # The kept predictions get the margin of this search, too.
            before = () if plan.options.fresh else folder.read_predicted()
            after = tuple(with_margin(record, plan.margin_bytes) for record in before)
            if after != before:
                folder.write_predicted(after)
            yield writer, tuple(known)
        finally:
            with contextlib.suppress(OSError):  # removed, or read-only meanwhile
                _remove_empty(folder, existed)


def _remove_empty(folder: ResultsFolder, existed: Sequence[Path]) -> None:
    """Remove the journal if it is empty, and the folders that were made for it."""
    if folder.journal.stat().st_size:
        return
    folder.journal.unlink()
    for path in (folder.path, *folder.path.parents):
        if path in existed:
            break
        path.rmdir()  # fails if the folder is not empty


def _set_aside(plan: SearchPlan) -> None:
    """Rename the journal of earlier searches, so that this one starts afresh and none is lost."""
    journal = plan.target.folder.journal
    if not journal.exists():
        return
    with plan.target.folder.writer():  # no other search is writing
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
        kept = journal.with_name(f"trials-{stamp}.jsonl")
        while kept.exists():  # the clock was set back, and renaming would replace it
            kept = kept.with_name(f"{kept.stem}_{kept.suffix}")
        journal.rename(kept)


@dataclass(frozen=True, slots=True)
class Contents:
    """Input of the files in the results folder of `target`.

    `how` holds the arguments of `build_view` that choose among the records and describe them.
    """

    target: Target
    facts: SpaceFacts
    records: Sequence[TrialRecord]
    how: Mapping[str, Any]
    timeline_of: TimelineOf


def write_results(contents: Sequence[Contents]) -> list[View]:
    """Write every file of each folder, and return the views that they show."""
    views = [build_view(one.records, one.facts, one.target.gpu, **one.how) for one in contents]
    for one, view in zip(contents, views, strict=True):
        write_view(one.target.folder, view, timeline_of=one.timeline_of)
    return views


def redraw(targets: Sequence[Target], where: tuple[str, ...] = ()) -> list[View]:
    """Write table, recommendation, picture and report of each target again; return their views.

    No trial runs: the numbers come from the journal. The memory over a step is traced, unless the
    search kept that of the configuration that is recommended now. Without `where`, the conditions,
    the command and the notes of the search stay, as in `best.yaml`. Raises `UnavailableError` if a
    target was not searched, and `InputError` for an invalid condition; nothing is written then.
    """
    with quiet_libraries():
        return write_results([_contents(target, where) for target in targets])


def _contents(target: Target, where: tuple[str, ...]) -> Contents:
    records = usable(target).comparable
    kept = _kept(target.folder.best_yaml)
    search = _mapping(kept.get("search"))
    conditions = where or _texts(_mapping(kept.get("chosen_from")).get("conditions"))
    return Contents(
        target,
        target.facts,
        records,
        {
            "where": lambda configuration: target.space.matches(configuration, conditions),
            "conditions": check_conditions(target, conditions),
            "command": "".join(_texts([search.get("command")])),
            "notes": _texts(search.get("notes")),
        },
        functools.partial(_timeline_if_known, target),
    )


def timeline_of(
    space: SearchSpace, gpu: Gpu, profile: DeviceProfile | None, best: BestTrial
) -> MemoryTimeline | None:
    """The memory timeline of `best` in its limiting stage; None where nothing is predicted."""
    if not is_predicted(space, gpu):
        return None
    stages = space.stage_configurations(best.configuration)
    configuration = stages.get(best.evidence.limiting_stage or "", best.configuration)
    subject = Subject(space.workload, space.predicted_model())
    return trace_timeline(subject, configuration, gpu, profile=profile)


def _timeline_if_known(target: Target, best: BestTrial) -> MemoryTimeline | None:
    """`timeline_of`; None, too, where the model of an earlier search is no longer there."""
    try:
        return timeline_of(target.space, target.gpu, find_profile(target.gpu), best)
    except TunerError:
        return None


def _kept(path: Path) -> Mapping[str, Any]:
    """The content of the search's `best.yaml`; empty where there is none yet."""
    try:
        return _mapping(yaml.safe_load(read_file(path, MAX_BYTES)))
    except FileNotFoundError:
        return {}
    except (InputError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UnavailableError(
            f"cannot read {str(path)!r}: {error}", hint="remove it: the journal has all numbers"
        ) from error


def _texts(values: object) -> tuple[str, ...]:
    """The texts of a list. Others are dropped: nested YAML aliases can expand to gigabytes."""
    return tuple(v for v in values if isinstance(v, str)) if isinstance(values, list) else ()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
