"""Takes the results of a job on a cluster into the results folder at home.

Nothing is overwritten: of the job's journal those lines are appended to the one at home that it
does not hold yet, so that fetching twice, or while the job still runs, adds what is new and
nothing else. Tables, pictures and the report are made again here, of all trials that are there.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.engine.job_files import JobFiles, JobRequest
from tuner.engine.target import Target, check_conditions, comparable, load_target
from tuner.errors import InputError, TunerError, UnavailableError
from tuner.records import TrialRecord
from tuner.results.journal import encode, read_journal
from tuner.results.store import JOURNAL, ResultsFolder, safe_name, write_atomically
from tuner.results.view import View
from tuner.results.writing import write_all
from tuner.space import pin


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came home for one space and GPU type.

    `total` is how many trials the job has, `added` how many were new here. `view` is what the
    files show; None where they could not be made again, and `note` then says why.
    """

    folder: ResultsFolder
    total: int
    added: int
    view: View | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a search was told that its files depend on."""

    space_name: str
    model: str | None = None
    gpu_memory: int | None = None
    price: float | None = None
    where: tuple[str, ...] = ()
    settings: Mapping[str, Any] | None = None
    objectives: tuple[str, ...] = ()


def take_home(files: JobFiles, results: Path, choice: Choice) -> tuple[Fetched, ...]:
    """Merge the journals of a job into `results`, and make the other files again.

    Raises `UnavailableError` for a journal that holds something else than trials, before
    anything is written; `InputError` while another search writes to the same folder.
    """
    groups = _by_folder(_records(files, files.journals))
    predictions = _by_folder(_records(files, files.predictions))
    found = []
    for (space, gpu), records in groups.items():
        # A name becomes one component of a path here, whatever it is.
        folder = ResultsFolder(results, space, gpu)
        added = _merge(folder, records)
        if (space, gpu) in predictions:
            _merge_predictions(folder, predictions[space, gpu])
        _keep_timeline(folder, files.timelines)
        found.append(_written(Fetched(folder, len(records), added), files, choice))
    return tuple(found)


def _by_folder(records: Sequence[TrialRecord]) -> dict[tuple[str, str], list[TrialRecord]]:
    """The records of each space and GPU type."""
    groups: dict[tuple[str, str], list[TrialRecord]] = {}
    for record in records:
        groups.setdefault((record.space, record.gpu), []).append(record)
    return groups


def _records(files: JobFiles, texts: Sequence[str]) -> list[TrialRecord]:
    """The records of journals of a job, in their order."""
    found: list[TrialRecord] = []
    with tempfile.TemporaryDirectory(prefix="tuner-") as scratch:
        path = Path(scratch) / JOURNAL
        for text in texts:
            path.write_text(text, "utf-8", "backslashreplace")
            try:
                found += read_journal(path).records
            except InputError as error:
                raise UnavailableError(
                    f"a journal of {files.request.id!r} holds something that is not a trial: "
                    + "; ".join(str(p.message) for p in error.problems[:3]),
                    hint="is the same version of tuner installed on the cluster?",
                ) from error
    return found


def _merge(folder: ResultsFolder, records: Sequence[TrialRecord]) -> int:
    """Append what the journal does not hold; returns how many records that were."""
    folder.check_writable()
    with folder.writer() as writer:
        new = _lacking(folder.read().records, records)
        for record in new:
            writer.append(record)
    return len(new)


def _merge_predictions(folder: ResultsFolder, records: Sequence[TrialRecord]) -> None:
    """Add what is not among the predictions here; what is here stays."""
    own = read_journal(folder.predicted).records
    new = _lacking(own, records)
    if new:
        folder.write_predicted([*own, *new])


def _lacking(own: Sequence[TrialRecord], records: Sequence[TrialRecord]) -> list[TrialRecord]:
    known = {encode(record) for record in own}
    return [record for record in records if encode(record) not in known]


def _keep_timeline(folder: ResultsFolder, timelines: Sequence[str]) -> None:
    """Keep the job's memory over a step for the report, where there is none yet.

    The report takes it only if it is of what is recommended.
    """
    from tuner.estimators.memory_timeline import MemoryTimeline

    for text in timelines:
        try:
            data = json.loads(text)
            whole = MemoryTimeline.from_dict(data["course"])
            subject = data["of"]
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            continue  # a report without it says that it has none
        if folder.memory_timeline.exists() or subject.get("gpu") != folder.gpu:
            continue
        kept = json.dumps({"of": subject, "course": whole.to_dict()}, separators=(",", ":"))
        write_atomically(folder.memory_timeline, kept.encode("ascii"))


def _written(fetched: Fetched, files: JobFiles, choice: Choice) -> Fetched:
    """Make tables, pictures and report again of the journal at home."""
    try:
        with tempfile.TemporaryDirectory(prefix="tuner-") as scratch:
            target = _target(fetched.folder, files, choice, Path(scratch))
            view = _write(target, files.request, choice)
    except TunerError as error:
        return Fetched(fetched.folder, fetched.total, fetched.added, note=error.message)
    return Fetched(fetched.folder, fetched.total, fetched.added, view)


def _target(folder: ResultsFolder, files: JobFiles, choice: Choice, scratch: Path) -> Target:
    """The target of the job, with the space as the cluster had it."""
    name = choice.space_name
    if files.space_text is not None:
        # A space has the name of its file.
        path = scratch / f"{safe_name(Path(name).stem)}.yaml"
        path.write_text(files.space_text, "utf-8", "backslashreplace")
        name = str(path)
    elif "/" in name:
        raise InputError("the cluster did not send the search space")
    target = load_target(
        name,
        folder.gpu,
        model=choice.model,
        results=folder.root,
        gpu_memory=choice.gpu_memory,
        price=choice.price,
    )
    if target.space.name != folder.space:
        raise InputError(f"the trials are of {folder.space!r}, and not of {target.space.name!r}")
    return target


def _write(target: Target, request: JobRequest, choice: Choice) -> View:
    space = pin(target.space, choice.settings) if choice.settings else target.space
    target = dataclasses.replace(target, space=space)
    conditions = check_conditions(target, choice.where)
    pinned = {name: space.terms[name].read(v) for name, v in (choice.settings or {}).items()}
    facts = target.facts
    if choice.objectives:
        facts = dataclasses.replace(facts, objectives=tuple(dict.fromkeys(choice.objectives)))
    records = comparable(target.folder.read_all(), target)
    return write_all(
        target.folder,
        records,
        facts,
        target.gpu,
        where=lambda configuration: (
            all(configuration.get(name) == value for name, value in pinned.items())
            and space.matches(configuration, choice.where)
        ),
        conditions=(*conditions, *(f"{n} == {v!r}" for n, v in pinned.items())),
        command=shlex.join(["tuner", "submit", *request.arguments]),
        # What is kept is drawn; nothing is traced for it here.
        timeline_of=lambda best: None,
    )
