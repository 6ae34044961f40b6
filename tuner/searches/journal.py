"""`trials.jsonl`, the append-only journal of a search: one line per trial.

A line is written with a single `write` on a file opened for appending, so a reader never
sees two records mixed, and a kill can leave at most one torn line, at the end. All other files of
a results folder can be made again from this file.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import itertools
import json
import math
import os
import re
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tuner.core.errors import InputError, Problem, UnavailableError
from tuner.core.files import read_file
from tuner.core.kinds import SAYS_NOTHING
from tuner.core.meanwhile import without_collection
from tuner.core.records import JOURNAL_SCHEMA, Measurement, Source, Status, TrialRecord, most_known


def pooled(runs: Sequence[TrialRecord]) -> TrialRecord:
    """One record of the runs of one configuration, in the order in which they ended.

    The last run decides the status: a verification that ran out of memory outweighs the trial
    before it. If the last run succeeded, times are averaged over all comparable runs, memory is the
    largest, and the record is a verification if any run was one. A single run is unchanged.
    """
    if len(runs) == 1:
        return runs[0]
    distinct: dict[str, TrialRecord] = {}
    for run in runs:  # a line is written again for another margin
        distinct.pop(run.trial_id, None)
        distinct[run.trial_id] = run
    every = list(distinct.values())
    telling = [r for r in every if not (r.verification and r.outcome.status in SAYS_NOTHING)]
    last = (telling or every)[-1]
    alike = [run for run in telling if run.outcome.status is Status.OK and run.alike(last)]
    ran = [found for run in alike if (found := run.outcome.ran) is not None]
    if last.outcome.status is not Status.OK or len(ran) < 2:
        return last
    return replace(
        last,
        outcome=last.outcome.with_ran(_together(ran)),
        verification=any(run.verification for run in alike),
    )


def _together(runs: Sequence[Measurement]) -> Measurement:
    steps = sum(run.steps for run in runs)
    step_s = sum(run.steps * run.speed.step_s for run in runs) / steps
    last = runs[-1]
    speed = last.speed.slowed(step_s / last.speed.step_s)
    return replace(
        last,
        memory=max((run.memory for run in runs), key=lambda memory: memory.device_bytes),
        speed=speed,
        steps=steps,
        samples_per_s_interval=_interval(runs, speed.samples_per_s),
        evaluation_peak_bytes=most_known(run.evaluation_peak_bytes for run in runs),
        checkpoint_bytes=most_known(run.checkpoint_bytes for run in runs),
    )


def _interval(runs: Sequence[Measurement], rate: float) -> tuple[float, float] | None:
    """The interval of the mean rate: from steps within runs, and at least the range of runs."""
    known = [run.samples_per_s_interval for run in runs if run.samples_per_s_interval]
    if not known:
        return None
    within = math.sqrt(sum(((high - low) / 2) ** 2 for low, high in known)) / len(known)
    rates = [run.speed.samples_per_s for run in runs]
    half = max(within, (max(rates) - min(rates)) / 2)
    return rate - half, rate + half


MAX_PROBLEMS = 20
"""Maximum number of malformed lines in one error; a wrong file would otherwise fill the screen."""


MAX_BYTES = 1 << 30
"""Maximum size of a journal; a hundred thousand trials take a quarter of it."""


MAX_LINES = 2_000_000


@dataclass(frozen=True, slots=True)
class JournalContents:
    """Contents of a journal: its records in the order of writing, and notes for the user."""

    records: tuple[TrialRecord, ...]
    notes: tuple[str, ...] = ()


def check_writable(folder: Path) -> None:
    """Raises `InputError` unless files can be created in `folder`. Creates nothing.

    If the folder does not exist yet, its nearest existing parent is tested. It is called before a
    search starts, so that results of hours of trials can be written.
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

    A last line that is no record and has no line end was torn by a kill: it is dropped, with a
    note. Raises `InputError`, with all file names and line numbers, for any other line that is not
    a record of a known schema. A file whose name ends in ".gz" is decompressed.
    """
    try:
        data = read_file(path, MAX_BYTES)
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise EOFError(f"it holds more than {MAX_BYTES >> 20} MiB")
    except FileNotFoundError:
        return JournalContents(())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{str(path)!r} is damaged: {error}",
            hint="remove it: the search that wrote it writes it again",
        ) from error
    if data.count(b"\n") > MAX_LINES:
        raise InputError(
            f"{str(path)!r} has more than {MAX_LINES:,} lines: more than any search writes"
        )
    with without_collection():  # a hundred thousand records have no cycles
        return _contents(path, data)


@functools.lru_cache(maxsize=4)
def _contents(path: Path, data: bytes) -> JournalContents:
    """The records of these bytes; a search asks for the same ones up to three times."""
    records: list[TrialRecord] = []
    problems: list[Problem] = []
    notes: list[str] = []
    for number, line, is_whole in _lines(data):
        if not line.strip():
            continue
        parsed = _parse(line)
        if isinstance(parsed, TrialRecord):
            records.append(parsed)
        elif not is_whole and not parsed.startswith("schema"):
            notes.append(f"{path.name}:{number}: dropped a torn last line ({len(line)} bytes)")
        else:
            problems.append(Problem(parsed, f"{path}:{number}"))
    if problems:
        more = len(problems) - MAX_PROBLEMS
        message = f"{str(path)!r} has {len(problems)} line(s) that are not trial records"
        if more > 0:
            message += f" (the first {MAX_PROBLEMS} are listed)"
        raise InputError(
            message,
            hint="move the file away or remove those lines; nothing was changed",
            problems=problems[:MAX_PROBLEMS],
        )
    return JournalContents(tuple(records), tuple(notes))


def _lines(data: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """Yield each line with its number, and True if it has a line end; saves memory."""
    start = 0
    for number in itertools.count(1):
        end = data.find(b"\n", start)
        if end < 0:
            yield number, data[start:], False
            return
        yield number, data[start:end], True
        start = end + 1


def latest(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """One record per configuration and GPU, in the order of first appearance.

    A finished record replaces an interrupted one; then a measured one replaces an emulated one,
    and that a predicted one. Records that ran are pooled (see `pooled`); of predicted ones the last
    written counts. A prediction that was verified on an emulated device stays a prediction, with
    the verification beside it (`TrialRecord.verified_by`).
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
    if equals[0].source is Source.PREDICTED:
        return equals[-1]
    ran = pooled(equals)
    if ran.source is Source.EMULATED and all(record.verification for record in equals):
        predicted = [record for record in records if record.source is Source.PREDICTED]
        if predicted:
            # One emulated speed among predicted ones would not be comparable.
            return replace(_one_of(predicted), verified_by=ran)
    return ran


class JournalWriter:
    """Appends records to a journal; a second writer at the same time gets an `InputError`.

    It is a context manager: entering creates the folder and the file, takes the lock and cuts off
    a torn last line; leaving releases the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: tuple[str, ...] = ()
        self._fd: int | None = None
        self._bytes = 0
        """The size that this writer has left the file with."""

    def __enter__(self) -> JournalWriter:
        check_writable(self.path.parent)
        try:
            self._fd = _opened(self.path)
            self.notes = _mend_tail(self._fd, self.path)
            self._bytes = os.fstat(self._fd).st_size
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise _refused(self.path, error) from error
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)  # closing releases the lock
            self._fd = None

    def append(self, record: TrialRecord) -> None:
        """Write one record as one line and flush it to the disk.

        Raises `UnavailableError` if writing fails (the journal is then as before), if the journal
        was removed meanwhile, because the record would be lost, or if another writer has changed
        it: locks of some network file systems don't reach other machines. Raises ValueError for a
        record with NaN or infinity, which JSON does not support.
        """
        if self._fd is None:
            raise RuntimeError("the journal is not open")
        line = encode(record)
        before = os.fstat(self._fd)
        if not before.st_nlink:
            raise UnavailableError(
                f"{str(self.path)!r} was removed while the search ran",
                hint="the same command starts again, or continues from a restored copy",
            )
        if before.st_size != self._bytes:
            raise UnavailableError(
                f"another program has written to {str(self.path)!r} while the search ran",
                hint="locks of its file system seem not to reach other machines: run one search at "
                "a time there, or give each its own --results FOLDER",
            )
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(28, "no space left on the disk")
            os.fsync(self._fd)
            self._bytes += written
        except OSError as error:
            # If even that fails, the next search cuts off the torn line.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before.st_size)
            raise _refused(self.path, error) from error


def _refused(path: Path, error: OSError) -> UnavailableError:
    return UnavailableError(
        f"cannot write to {str(path)!r}: {error.strerror or error}",
        hint="every trial before this one is in the journal; free some space, or make the disk "
        "writable, and run again",
    )


def encode(record: TrialRecord) -> bytes:
    """The line of `record` with its line end; characters that UTF-8 cannot encode become "?"."""
    text = json.dumps(record.to_dict(), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", errors="replace") + b"\n"


def _parse(line: bytes) -> TrialRecord | str:
    """The record in a line, or a text about the problem with the line."""
    try:
        data = msgspec.json.decode(line)
    except UnicodeDecodeError:
        return "not JSON: bytes that are no UTF-8"
    except (msgspec.DecodeError, RecursionError):
        return "not JSON" + (_HALF if _SURROGATE.search(line) else "")
    if not isinstance(data, dict):
        return "not a trial record"
    schema = data.get("schema")
    if schema != JOURNAL_SCHEMA:
        return f"schema {schema!r}, this version reads schema {JOURNAL_SCHEMA}"
    try:
        return TrialRecord.from_dict(data)
    except (TypeError, ValueError) as error:
        return f"not a trial record: {error}"


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF = ", or half of a surrogate pair (\\ud800), which is no character"


def _standing(record: TrialRecord) -> tuple[bool, int]:
    outcome = record.outcome
    return (outcome.status is not Status.INTERRUPTED, record.source.rank)


def _opened(path: Path) -> int:
    """A locked descriptor of the journal at `path`, which is created if missing.

    Between opening and locking, a search with --fresh may rename the file, or a user may remove
    it. The locked file must still be the one at the path, or two searches could write at once.
    """
    for _ in range(_OPENING_TRIES):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # reading a pipe may never end
                raise InputError(
                    f"{str(path)!r} is not a file",
                    hint="move it away, or choose another folder with --results FOLDER",
                )
            _lock(descriptor, path)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise UnavailableError(f"{str(path)!r} is removed again and again while it is opened")


_OPENING_TRIES = 10


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
    except OSError as error:
        # NFS without its lock service says ENOLCK, other file systems EOPNOTSUPP or ENOSYS.
        raise UnavailableError(
            f"{str(path)!r} cannot be locked: {error.strerror or error}",
            hint="its file system has no locks, and two searches would mix their trials there; "
            "choose a folder on a local disk with --results FOLDER",
        ) from error


def _mend_tail(descriptor: int, path: Path) -> tuple[str, ...]:
    """Make the file end at a line end: complete a whole last record, or cut off a torn one."""
    data = path.read_bytes()
    tail = data[data.rfind(b"\n") + 1 :]
    if not tail:
        return ()
    if isinstance(_parse(tail), TrialRecord):
        os.write(descriptor, b"\n")
        return ()
    os.ftruncate(descriptor, len(data) - len(tail))
    return (f"{path.name}: cut off a torn last line ({len(tail)} bytes)",)
