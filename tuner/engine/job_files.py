"""The files of a search that was sent to a cluster: where they lie there, and how they come home.

A job's folder on the head node is its own: `~/tuner-jobs/ID/`, or below what the environment
variable TUNER_JOBS names. It holds `job.json`, what was asked for, and `results/`.

What comes home travels as text on the output of a second, short job, because that is the one way
that Ray's job server offers. It is data, checked as such when it arrives: journals, whose records
are read one by one and which name the files they end in. Nothing else is taken from a cluster,
which may be anybody's: no HTML, no path, no code.
"""

from __future__ import annotations

import base64
import binascii
import getpass
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tuner.errors import InputError, UnavailableError
from tuner.records.reading import read, written
from tuner.results.store import JOURNAL, PREDICTED, TIMELINE, write_atomically

FOLDER_VARIABLE = "TUNER_JOBS"
"""Environment variable of the head node that names the folder of all jobs."""

SCHEMA = 1

MAX_BYTES = 256 << 20
"""The most that one job's files may hold: a hundred thousand trials."""

SPACE = "space"
"""The space file, which comes home, too."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_FIRST, _LAST, _LINE = "tuner-files", "tuner-files-end", "tuner-files:"


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a job was asked for: `tuner search` with `arguments`, and the space it is about."""

    id: str
    arguments: tuple[str, ...]
    space: str
    gpu: str
    submitted_by: str = ""
    submitted_at: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {"schema": SCHEMA, **written(self)}

    @classmethod
    def from_dict(cls, data: Any) -> JobRequest:
        """The request. Raises ValueError for anything else."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError("not a job of this version of tuner")
        return read(cls, data)


@dataclass(frozen=True, slots=True)
class JobFiles:
    """What came home of one job, unread: journals, predictions, timelines, the space's text."""

    request: JobRequest
    journals: tuple[str, ...] = ()
    predictions: tuple[str, ...] = ()
    timelines: tuple[str, ...] = ()
    space_text: str | None = field(default=None, repr=False)


def check_id(text: str) -> str:
    """`text`. Raises `InputError` unless it can be the id of a job, and thus of a folder."""
    if _ID.fullmatch(text):
        return text
    raise InputError(
        f"{text[:200]!r} is not the id of a job",
        hint="`tuner jobs` lists them; letters, digits, dots, dashes and underscores",
    )


def jobs_folder() -> Path:
    """Where the jobs of this machine's cluster keep their files.

    Raises `UnavailableError` where nobody knows the home directory.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    try:
        return Path(named).expanduser() if named else Path.home() / "tuner-jobs"
    except RuntimeError as error:
        raise UnavailableError(
            f"no folder for the files of jobs: {error}",
            hint=f"name one with {FOLDER_VARIABLE}",
        ) from error


def open_folder(request: JobRequest, space_file: Path | None) -> Path:
    """Make the folder of a new job, for its owner only, and write down what it was asked for.

    Raises `InputError` where another job had this id, `UnavailableError` where the disk refuses.
    """
    folder = jobs_folder() / check_id(request.id)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise InputError(
            f"there are results of another job {request.id!r} in {str(folder.parent)!r}",
            hint="give this one another id",
        ) from None
    except OSError as error:
        raise UnavailableError(
            f"cannot make {str(folder)!r}: {error.strerror or error}",
            hint=f"set {FOLDER_VARIABLE} on the head node to a folder that can be written to",
        ) from error
    if space_file is not None:
        write_atomically(folder / SPACE, space_file.read_bytes())
    write_atomically(folder / "job.json", json.dumps(request.to_dict(), indent=1).encode())
    return folder


def new_request(
    job_id: str, arguments: Sequence[str], *, space: str, gpu: str, submitted_by: str = ""
) -> JobRequest:
    """A request made now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return JobRequest(check_id(job_id), tuple(arguments), space, gpu, submitted_by, now)


def user_name() -> str:
    """Who this is, for lists of jobs; empty where the system does not know."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without an entry
        return ""


# -- on the cluster ---------------------------------------------------------------------------


def pack(job_id: str) -> Iterator[str]:
    """The files of a job of this machine as lines of text, whether or not it still runs.

    Raises `InputError` for a job that left none, `UnavailableError` for more than `MAX_BYTES`.
    """
    folder = jobs_folder() / check_id(job_id)
    if not (folder / "job.json").is_file():
        raise InputError(
            f"no files of a job {job_id!r} in {str(folder.parent)!r} on the head node",
            hint="it may not have begun, or the head node is a new one",
        )
    request = json.loads((folder / "job.json").read_text("utf-8"))
    space = folder / SPACE
    content: dict[str, Any] = {
        "request": request,
        "space_text": space.read_text("utf-8") if space.is_file() else None,
        "journals": _texts(folder, JOURNAL),
        "predictions": _texts(folder, PREDICTED),
        "courses": _texts(folder, TIMELINE),
    }
    data = json.dumps(content).encode("ascii")
    if len(data) > MAX_BYTES:
        raise UnavailableError(
            f"the files of {job_id!r} hold {len(data) >> 20} MiB; at most {MAX_BYTES >> 20} MiB "
            "can be fetched",
            hint=f"copy {str(folder)!r} from the head node",
        )
    packed = base64.b64encode(zlib.compress(data)).decode("ascii")
    yield f"{_FIRST} {SCHEMA} {len(data)} {hashlib.sha256(data).hexdigest()}"
    yield from (_LINE + packed[at : at + 4000] for at in range(0, len(packed), 4000))
    yield _LAST


def _texts(folder: Path, name: str) -> list[str]:
    """The files of that name in the results of each space and GPU type."""
    found = [path.read_bytes() for path in sorted(folder.glob(f"results/*/*/{name}"))]
    return [(gzip.decompress(data) if name.endswith(".gz") else data).decode() for data in found]


# -- at home ----------------------------------------------------------------------------------


def unpack(lines: Iterable[str], job_id: str) -> JobFiles | None:
    """What `pack` wrote among other `lines`; None where its last line is missing.

    Raises `UnavailableError` for what is not the files of this job.
    """
    found = [line.strip() for line in lines]
    heads = [line for line in found if line.startswith(_FIRST + " ")]
    if not heads or _LAST not in found:
        return None
    packed = "".join(line.removeprefix(_LINE) for line in found if line.startswith(_LINE))
    try:
        _, schema, size, digest = heads[0].split(" ")
        if schema != str(SCHEMA):
            raise ValueError(f"the cluster packs files as version {schema}, not {SCHEMA}")
        if int(size) > MAX_BYTES:
            raise ValueError(f"{int(size) >> 20} MiB is too much")
        data = _inflate(base64.b64decode(packed, validate=True), int(size))
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError("not all of it arrived")
        return _read(json.loads(data), job_id)
    except (ValueError, RecursionError, zlib.error, binascii.Error) as error:
        raise UnavailableError(
            f"what the cluster sent as the files of {job_id!r} is unusable: {error}",
            hint="is the same version of tuner installed there?",
        ) from error


def _inflate(packed: bytes, size: int) -> bytes:
    """`packed` unpacked; ValueError unless that makes exactly `size` bytes, however much it is."""
    inflater = zlib.decompressobj()
    data = inflater.decompress(packed, size + 1)
    if len(data) != size:
        raise ValueError("its size is not the announced one")
    return data


def _read(content: Any, job_id: str) -> JobFiles:
    if not isinstance(content, dict):
        raise ValueError("not a job's files")
    request = JobRequest.from_dict(content.get("request"))
    if request.id != job_id:
        raise ValueError(f"they are those of {request.id[:200]!r}")
    text = content.get("space_text")
    if not (text is None or isinstance(text, str)):
        raise ValueError("the space is not text")
    lists = [content.get("journals"), content.get("predictions", []), content.get("courses")]
    for each in lists:
        if not isinstance(each, list) or not all(isinstance(t, str) for t in each):
            raise ValueError("a journal is not text")
    journals, predictions, timelines = (tuple(each or ()) for each in lists)
    return JobFiles(request, journals, predictions, timelines, text)
