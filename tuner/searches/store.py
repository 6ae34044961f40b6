"""The files in `results/<space>/<gpu>/`: their paths, and atomic writing."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tuner.core.errors import InputError, UnavailableError
from tuner.core.files import shipped_places
from tuner.core.records import TrialRecord
from tuner.searches.journal import (
    JournalContents,
    JournalWriter,
    check_writable,
    encode,
    read_journal,
)

JOURNAL, PREDICTED, TIMELINE = "trials.jsonl", "predicted.jsonl.gz", "memory_course.json"
"""Data files of a results folder; all other files are made from these."""

RAY_COPIES = "working_dir_files"
"""Folder of a Ray session with copies of its jobs' working directories, which Ray removes."""

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)")
"""A URI such as "s3://bucket/results", in which `Path` makes one slash of two."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")


@dataclass(frozen=True, slots=True)
class ResultsFolder:
    """The files of one search space on one GPU type, under `root`.

    `space` and `gpu` are names, never paths: unsafe characters are replaced, so that no name leads
    out of `root`, and different names lead to different folders. Raises `InputError` if `root` is a
    URI: it would be a local folder of that name.
    """

    root: Path
    space: str
    gpu: str

    def __post_init__(self) -> None:
        if uri := _URI.fullmatch(str(self.root)):
            raise InputError(
                f"results can't be kept at '{uri[1]}://{uri[2]}': --results takes a folder",
                hint="name a folder on a local disk or a shared file system, and copy it to the "
                "object store afterwards",
            )

    @property
    def path(self) -> Path:
        """The folder itself."""
        return self.root / safe_name(self.space) / safe_name(self.gpu)

    @property
    def journal(self) -> Path:
        """`trials.jsonl`, from which all other files can be made again."""
        return self.path / JOURNAL

    @property
    def predicted(self) -> Path:
        """The predictions of every configuration, as a compressed journal."""
        return self.path / PREDICTED

    @property
    def has_results(self) -> bool:
        """True if there is a journal or a file of predictions."""
        return self.journal.exists() or self.predicted.exists()

    @property
    def pareto_csv(self) -> Path:
        """The front as a table."""
        return self.path / "pareto.csv"

    @property
    def best_yaml(self) -> Path:
        """The recommended configuration."""
        return self.path / "best.yaml"

    @property
    def pareto_png(self) -> Path:
        """The front as a picture."""
        return self.path / "pareto.png"

    @property
    def report_html(self) -> Path:
        """The report."""
        return self.path / "report.html"

    @property
    def memory_timeline(self) -> Path:
        """The memory of the recommended configuration over a step."""
        return self.path / TIMELINE

    def check_writable(self) -> None:
        """Raise `InputError` unless the files can be written and will be kept. Creates nothing."""
        if RAY_COPIES in self.path.absolute().parts:
            raise InputError(
                f"the results folder {str(self.root)!r} is in Ray's copy of the job's working "
                "directory, which Ray removes after the job",
                hint="give --results an absolute path outside of it, such as ~/results",
            )
        check_writable(self.path)

    def read(self) -> JournalContents:
        """All records of the journal; empty before the first search."""
        return read_journal(self.journal)

    def read_all(self) -> tuple[TrialRecord, ...]:
        """The predictions of the space, then the records of the journal, which override them."""
        return (*self.read_predicted(), *self.read().records)

    def read_predicted(self) -> tuple[TrialRecord, ...]:
        """The predictions of the whole space; empty if there are none."""
        return read_journal(self.predicted).records

    def write_predicted(self, records: Iterable[TrialRecord]) -> None:
        """Replace the predictions of the space. Raises `UnavailableError` if writing fails."""
        lines = b"".join(map(encode, records))
        write_atomically(self.predicted, gzip.compress(lines, mtime=0))

    def writer(self) -> JournalWriter:
        """The journal to append to, as a context manager."""
        return JournalWriter(self.journal)


def shipped(space: str, gpu: str) -> ResultsFolder | None:
    """The results of a space that come with tuner; None without any for this GPU type."""
    roots = shipped_places("shipped_results", "results")
    folders = (ResultsFolder(root, space, gpu) for root in roots)
    return next((folder for folder in folders if folder.has_results), None)


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write `path` through a temporary file beside it; a failure leaves no partial file.

    A text becomes UTF-8; lone surrogates, which JSON allows and UTF-8 does not, are escaped. Raises
    `UnavailableError` if writing fails.
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "backslashreplace")
    # The name is random, so that others cannot place a link there to be written through.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # still there only when something went wrong
    except OSError as error:
        raise UnavailableError(
            f"cannot write {str(path)!r}: {error.strerror or error}",
            hint="the journal is whole: free some space, and the same command writes it again",
        ) from error


def safe_name(name: str) -> str:
    """`name` as one path component; a short hash keeps changed names apart."""
    if _SAFE_NAME.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")[:60]
    return f"{readable}-{digest}" if readable else f"unnamed-{digest}"
