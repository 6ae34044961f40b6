"""`trials.jsonl`: one line per trial, only ever appended to, and the truth of a search.

A line is written with a single `write` on a file opened for appending, so a reader never
sees two records mixed, and a kill can leave at most one torn line, at the end. Everything
else in a results folder can be made again from this file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tuner.errors import InputError, Problem, UnavailableError
from tuner.records import JOURNAL_SCHEMA, Source, StageNumbers, Status, TrialRecord
from tuner.results.repeats import pooled

MAX_MAGNITUDE = 1e30
"""No quantity of a training run comes near it (an exaFLOP for a century is 3e27), and beyond a
float's range a number cannot be shown."""

MAX_PROBLEMS = 20
"""How many malformed lines one error lists; a wrong file would otherwise fill the screen."""


@dataclass(frozen=True, slots=True)
class JournalContents:
    """What a journal holds: its records in the order of writing, and notes for the user."""

    records: tuple[TrialRecord, ...]
    notes: tuple[str, ...] = ()


def check_writable(folder: Path) -> None:
    """Raises `InputError` unless files can be created in `folder`. Creates nothing.

    Where the folder does not exist yet, its nearest existing parent is tried. Called before
    a search starts, so that hours of trials never end at a folder that refuses them.
    """
    nearest = folder
    try:
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        with tempfile.TemporaryFile(dir=nearest):
            pass
        for path in folder.iterdir() if nearest == folder else ():
            if path.name == "trials.jsonl" and not os.access(path, os.W_OK):
                raise PermissionError(13, "the journal in it is read-only")
    except OSError as error:
        raise InputError(
            f"cannot write results to {str(folder)!r}: {error.strerror or error}",
            hint="choose a folder that you can write to, with --results FOLDER",
        ) from error


def read_journal(path: Path) -> JournalContents:
    """The records in `path`; empty when there is no such file.

    A last line without its line end that is not a record was torn by a kill: it is dropped,
    with a note. Any other line that is not a record of a known schema is an `InputError`
    that names the file and each such line.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return JournalContents(())
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    lines = data.split(b"\n")
    torn_index = len(lines) - 1  # what follows the last line end; empty in a whole file
    records: list[TrialRecord] = []
    problems: list[Problem] = []
    notes: list[str] = []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        parsed = _parse(line)
        if isinstance(parsed, TrialRecord):
            records.append(parsed)
        elif index == torn_index and not parsed.startswith("schema"):
            notes.append(f"{path.name}:{index + 1}: dropped a torn last line ({len(line)} bytes)")
        else:
            problems.append(Problem(parsed, f"{path}:{index + 1}"))
    if problems:
        raise _unreadable(path, problems)
    return JournalContents(tuple(records), tuple(notes))


def latest(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """One record per configuration and GPU, in the order of first appearance.

    Of several, a measured one beats a predicted one and one that ran to its end beats an
    interrupted one; measured ones are pooled (see `pooled`), and of predicted ones the last
    written wins.
    """
    found: dict[tuple[str, str, int, str], list[TrialRecord]] = {}
    for record in records:
        key = (record.space, record.gpu, record.gpu_memory_bytes, record.configuration.key)
        found.setdefault(key, []).append(record)
    return tuple(_one_of(trials) for trials in found.values())


def _one_of(records: Sequence[TrialRecord]) -> TrialRecord:
    """The record that stands for all trials of one configuration."""
    highest = max(map(_standing, records))
    equals = [record for record in records if _standing(record) == highest]
    return pooled(equals) if equals[0].source is Source.MEASURED else equals[-1]


class JournalWriter:
    """Appends records to a journal; one writer at a time, the second gets an `InputError`.

    A context manager: entering creates the folder and the file, takes the lock and cuts off
    a torn last line; leaving releases the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: tuple[str, ...] = ()
        self._fd: int | None = None

    def __enter__(self) -> JournalWriter:
        check_writable(self.path.parent)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(descriptor, self.path)
            self.notes = _mend_tail(descriptor, self.path)
        except BaseException:
            os.close(descriptor)
            raise
        self._fd = descriptor
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fd is not None:
            os.close(self._fd)  # closing releases the lock
            self._fd = None

    def append(self, record: TrialRecord) -> None:
        """Writes one record as one line and hands it to the disk.

        Raises `UnavailableError` when the disk refuses it; the journal is then as before.
        Raises ValueError for a record that holds NaN or infinity, which JSON cannot.
        """
        if self._fd is None:
            raise RuntimeError("the journal is not open")
        line = encode(record)
        size_before = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(28, "no space left on the disk")
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, size_before)
            raise UnavailableError(
                f"cannot write to {str(self.path)!r}: {error.strerror or error}",
                hint="every trial before this one is in the journal; free some space and run again",
            ) from error


def encode(record: TrialRecord) -> bytes:
    """The line of `record`, line end included. ASCII, so no line end hides in a name."""
    text = json.dumps(record.to_dict(), separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def _parse(line: bytes) -> TrialRecord | str:
    """The record in a line, or what is wrong with the line."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return "not JSON"
    if not isinstance(data, dict):
        return "not a trial record"
    schema = data.get("schema")
    if schema != JOURNAL_SCHEMA:
        return f"schema {schema!r}, this version reads schema {JOURNAL_SCHEMA}"
    try:
        record = TrialRecord.from_dict(data)
    except KeyError as error:
        return f"field {error} is missing"
    except (TypeError, ValueError, AttributeError) as error:
        return f"not a trial record: {error}"
    return _wrong_types(record) or record


def _unreadable(path: Path, problems: list[Problem]) -> InputError:
    more = len(problems) - MAX_PROBLEMS
    message = f"{str(path)!r} has {len(problems)} line(s) that are not trial records"
    if more > 0:
        message += f" (the first {MAX_PROBLEMS} are listed)"
    return InputError(
        message,
        hint="move the file away or remove those lines; nothing was changed",
        problems=problems[:MAX_PROBLEMS],
    )


def _standing(record: TrialRecord) -> tuple[bool, bool]:
    outcome = record.outcome
    return (outcome.status is not Status.INTERRUPTED, record.source is Source.MEASURED)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_MAGNITUDE


def _is_number(value: object) -> bool:
    # False of nan, too.
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= MAX_MAGNITUDE
    )


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value))


def _is_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_str, value))


def _is_knob_value(value: object) -> bool:
    if isinstance(value, int | float):
        return abs(value) <= sys.float_info.max
    return isinstance(value, str) or _is_texts(value)


def _is_stage(value: object) -> bool:
    return isinstance(value, StageNumbers) and not _wrong_types(value)


def _mapping_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    def is_mapping(value: object) -> bool:
        return isinstance(value, Mapping) and all(map(check, value.values()))

    return is_mapping


_TYPE_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": _is_int,
    "int | None": lambda value: value is None or _is_int(value),
    "float": _is_number,
    "float | None": lambda value: value is None or _is_number(value),
    "str": _is_str,
    "str | None": lambda value: value is None or _is_str(value),
    "Mapping[str, int]": _mapping_of(_is_int),
    "Mapping[str, float]": _mapping_of(_is_number),
    "Mapping[str, str]": _mapping_of(_is_str),
    "Mapping[str, tuple[float, float]]": _mapping_of(_is_pair),
    "Mapping[str, StageNumbers]": _mapping_of(_is_stage),
    "tuple[float, float] | None": lambda value: value is None or _is_pair(value),
    "tuple[str, ...]": _is_texts,
    "Configuration": _mapping_of(_is_knob_value),
}


def _wrong_types(record: Any, prefix: str = "") -> str:
    """The first field whose value is not of its declared type, or an empty string.

    Sorting and formatting would otherwise fail far from the line that is wrong.
    """
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        check = _TYPE_CHECKS.get(str(field.type))
        if dataclasses.is_dataclass(value):
            wrong = _wrong_types(value, f"{prefix}{field.name}.")
            if wrong:
                return wrong
        elif check is not None and not check(value):
            return f"field {prefix}{field.name} is {value!r:.40}, expected {field.type}"
    return ""


def _lock(descriptor: int, path: Path) -> None:
    if sys.platform == "win32":
        return  # no advisory locks of this kind; appends are still whole lines
    import fcntl  # POSIX only

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"another search is writing to {str(path)!r}",
            hint="wait for it, or give this one another folder with --results FOLDER",
        ) from error


def _mend_tail(descriptor: int, path: Path) -> tuple[str, ...]:
    """Makes the file end at a line end: completes a whole last record, cuts a torn one."""
    data = path.read_bytes()
    tail = data[data.rfind(b"\n") + 1 :]
    if not tail:
        return ()
    if isinstance(_parse(tail), TrialRecord):
        os.write(descriptor, b"\n")
        return ()
    os.ftruncate(descriptor, len(data) - len(tail))
    return (f"{path.name}: cut off a torn last line ({len(tail)} bytes)",)
