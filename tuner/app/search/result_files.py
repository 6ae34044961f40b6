"""The files of a search: read before it, written after it, drawn again, and shared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tuner.app.plausible import say
from tuner.app.search.plan import SearchPlan
from tuner.app.target import (
    Target,
    check_conditions,
    comparable,
    require_records,
    sorted_by_use,
    with_margin,
)
from tuner.core.errors import InputError, UnavailableError
from tuner.core.files import read_file
from tuner.core.records import Configuration, TrialRecord
from tuner.core.setup.schemas import SCHEMAS
from tuner.report.memory_timeline import TimelineOf
from tuner.report.other_gpus import MAX_BYTES
from tuner.report.prediction_error import QUANTITIES, Evidence, Pair, pairs
from tuner.report.writing import write_tables, write_view
from tuner.searches.facts import SpaceFacts
from tuner.searches.journal import JournalWriter, latest, read_journal
from tuner.searches.store import ResultsFolder
from tuner.searches.view import View, build_view
from tuner.space.models.catalogue import get_entry


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
            say(found.aside)
            for record in found.comparable:
                changed = with_margin(record, plan.margin_bytes)
                if changed != record:
                    writer.append(changed)
                known.append(changed)
            _change_margin(plan)
            yield writer, tuple(known)
        finally:
            with contextlib.suppress(OSError):  # removed, or read-only meanwhile
                _remove_empty(folder, existed)


def _change_margin(plan: SearchPlan) -> None:
    """Write the kept predictions again with the margin of this search."""
    folder = plan.target.folder
    if plan.options.fresh or not folder.predicted.exists():
        return
    before = read_journal(folder.predicted).records
    after = tuple(with_margin(record, plan.margin_bytes) for record in before)
    if after != before:
        folder.write_predicted(after)


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
    """Write every file of each folder, and return the views that they show.

    All tables are written first: each report also shows the fronts of the other GPU types.
    """
    views = [build_view(one.records, one.facts, one.target.gpu, **one.how) for one in contents]
    folders = [one.target.folder for one in contents]
    if len(contents) > 1:
        for folder, view in zip(folders, views, strict=True):
            write_tables(folder, view)
    together = [folder.path.name for folder in folders]
    for one, folder, view in zip(contents, folders, views, strict=True):
        write_view(folder, view, timeline_of=one.timeline_of, written_together=together)
    return views


def redraw(targets: Sequence[Target], where: tuple[str, ...] = ()) -> list[View]:
    """Write table, recommendation, picture and report of each target again; return their views.

    Nothing is traced or run: the numbers come from the journal, and the memory over a step is shown
    only if the search kept it for the configuration that is recommended now. Without `where`, the
    conditions, the command and the notes of the search stay, as in `best.yaml`. Raises
    `UnavailableError` if a target was not searched, and `InputError` for an invalid condition;
    nothing is written then.
    """
    return write_results([_contents(target, where) for target in targets])


def _contents(target: Target, where: tuple[str, ...]) -> Contents:
    records = require_records(target)
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
        lambda best: None,
    )


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


SCHEMA = 1


def reported_runs(target: Target) -> list[dict[str, Any]]:
    """A row for each measured configuration of the target, the fastest first.

    Raises `UnavailableError` for the user's own code, and if nothing was measured.
    """
    if not target.space.predictable:
        raise UnavailableError(
            f"search space {target.space.name!r} runs your own code, which no row can tell of"
        )
    found = pairs(latest(comparable(target.known.read().records, target)))
    if not found:
        raise UnavailableError(
            f"no trial of {target.space.name!r} was measured on {target.gpu.name}",
            hint=f"on a machine with one: `{target.command('search')}`",
        )
    found = sorted(found, key=lambda pair: -pair.measured.speed.samples_per_s)
    return [_row(target, pair) for pair in found]


def _row(target: Target, pair: Pair) -> dict[str, Any]:
    record = pair.record
    return {
        "schema": SCHEMA,
        "model": _model(target, record),
        "workload": target.space.workload,
        "gpu": record.gpu,
        "device": record.device,
        "gpu_memory_bytes": record.gpu_memory_bytes,
        "configuration": _configuration(target, record.configuration),
        "versions": {name: text for name, text in record.versions.items() if name != "model"},
        "weights": pair.measured.weights,
        "lengths": pair.measured.lengths,
        "steps": pair.measured.steps,
        "measured": _numbers(pair.measured),
        "predicted": {**_numbers(pair.predicted), "method": pair.predicted.method},
    }


def _numbers(evidence: Evidence) -> dict[str, float]:
    return {quantity.name: quantity.value(evidence) for quantity in QUANTITIES}


def _model(target: Target, record: TrialRecord) -> str:
    """A model's public name, or the digest of an architecture without one."""
    name = target.space.model or ""
    if get_entry(name) is not None:
        return name
    return f"architecture {record.versions.get('model', '').rpartition(' ')[2]}"


def _configuration(target: Target, configuration: Configuration) -> dict[str, Any]:
    """The knobs of the vocabulary whose values are numbers, allowed words or lists: no paths."""
    terms = SCHEMAS[target.space.workload].terms
    return {
        name: value
        for name, value in configuration.to_dict().items()
        if name in terms and (not isinstance(value, str) or value in terms[name].allowed)
    }
