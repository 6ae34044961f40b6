"""Ray's job server: sends a search to a cluster, and asks what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from tuner.errors import EXIT_NOTHING_FITS, InputError, UnavailableError
from tuner.tune.job_connection import client_of, said, silent

KIND, SEARCH, FETCH = "tuner", "search", "fetch"
"""Key of a job's metadata that says that it is of this program, and its values."""

STOP_WAIT_S = 120
"""How long a search may take to end after it was told to; Ray's default is 3 s, and then the
results would not be written. A search ends its trials and writes what it has."""

POLL_S = 0.5

NOTHING_FITS_THERE = 10
"""Exit code of a job in which nothing fits. That of `tuner search` would be 1, with which Python
also ends when something is broken."""


class State(enum.StrEnum):
    """What became of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    NOTHING_FITS = "nothing fits"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether it will stay what it is."""
        return self not in (State.WAITING, State.RUNNING)


@dataclass(frozen=True, slots=True)
class RayJob:
    """A search on the cluster. Times are seconds since 1970, by the cluster's clock.

    `exit_code` is that of `tuner search` there, None while it runs and where Ray does not know.
    `message` is what Ray says of a job that failed.
    """

    id: str
    state: State
    space: str = ""
    gpu: str = ""
    submitted_by: str = ""
    started_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    message: str = ""


class JobServer:
    """The job server of one cluster. Every method raises `UnavailableError` when it is gone."""

    def __init__(self, client: JobSubmissionClient, address: str) -> None:
        self._client = client
        self.address = address

    def submit(
        self,
        job_id: str,
        command: str,
        *,
        metadata: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        """Start `command` on the head node, in a copy of `folder`.

        Raises `InputError` where a job has this id already.
        """
        environment: dict[str, Any] = {
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)},
        }
        if folder is not None:
            environment["working_dir"] = str(folder)
        with self._errors(), silent():
            try:
                self._client.submit_job(
                    entrypoint=command,
                    submission_id=job_id,
                    runtime_env=environment,
                    metadata=dict(metadata),
                )
            except RuntimeError as error:
                if "already exists" in str(error):
                    raise InputError(
                        f"the cluster has a job {job_id!r} already",
                        hint="give this one another --id",
                    ) from error
                raise

    def jobs(self) -> list[RayJob]:
        """The searches that the cluster remembers, the newest first."""
        with self._errors():
            found = self._client.list_jobs()
            searches = [_job(d) for d in found if (d.metadata or {}).get(KIND) == SEARCH]
        return sorted(searches, key=lambda job: job.started_s or 0.0, reverse=True)

    def job(self, job_id: str) -> RayJob:
        """One job. Raises `InputError` where the cluster does not know it."""
        with self._errors(job_id):
            return _job(self._client.get_job_info(job_id))

    def logs(self, job_id: str) -> str:
        """What the job has printed until now."""
        with self._errors(job_id):
            return str(self._client.get_job_logs(job_id))

    def follow(self, job_id: str) -> Iterator[str]:
        """What the job has printed, and what it prints from now on, until it ends."""
        self.job(job_id)
        pieces = self._client.tail_job_logs(job_id)

        async def next_piece() -> str | None:
            return await anext(pieces, None)

        with self._errors(job_id), silent(), asyncio.Runner() as runner:
            while (piece := runner.run(next_piece())) is not None:
                yield piece

    def stop(self, job_id: str) -> bool:
        """Tell a job to end; whether it was running."""
        with self._errors(job_id):
            return bool(self._client.stop_job(job_id))

    def wait(self, job_id: str, timeout_s: float) -> RayJob:
        """The job when it has ended, or as it is after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            job = self.job(job_id)
            if job.state.ended or time.monotonic() >= deadline:
                return job
            time.sleep(POLL_S)

    def forget(self, job_id: str) -> None:
        """Strike an ended job off the cluster's list."""
        with self._errors(job_id):
            self._client.delete_job(job_id)

    def tidy(self, before_s: float) -> None:
        """Strike off the jobs that only read files and ended before then, by the cluster's clock.

        Not sooner: Ray, which looks at a job about once a second, would put one whose end it has
        not seen on the list again, as failed.
        """
        with self._errors():
            found = self._client.list_jobs()
        for details in found:
            is_reader = (details.metadata or {}).get(KIND) == FETCH
            if is_reader and details.end_time and details.end_time / 1000 < before_s:
                with contextlib.suppress(InputError):  # somebody else has done it meanwhile
                    self.forget(details.submission_id or "")

    @contextlib.contextmanager
    def _errors(self, job_id: str = "") -> Iterator[None]:
        """What the client raises, said to the user."""
        with said(self.address):
            try:
                yield
            except RuntimeError as error:
                if job_id and "does not exist" in str(error):
                    raise InputError(
                        f"the cluster at {self.address} knows no job {job_id!r}",
                        hint="`tuner jobs` lists those it knows; it forgets them when its head "
                        "node restarts",
                    ) from error
                raise UnavailableError(
                    f"the job server at {self.address} refuses: {_short(error)}"
                ) from error


def connect(address: str | None = None) -> JobServer:
    """The job server at `address`, else at RAY_API_SERVER_ADDRESS, else on this machine.

    Raises `InputError` for what is no address, `UnavailableError` where no job server answers, and
    where it asks for a token and there is none, or another one.
    """
    client, url = client_of(address)
    return JobServer(client, url)


_STATES = {
    JobStatus.PENDING: State.WAITING,
    JobStatus.RUNNING: State.RUNNING,
    JobStatus.STOPPED: State.STOPPED,
    JobStatus.SUCCEEDED: State.DONE,
    JobStatus.FAILED: State.FAILED,
}


def _job(details: JobDetails) -> RayJob:
    metadata = details.metadata or {}
    state, code = _STATES[details.status], details.driver_exit_code
    if state is State.FAILED and code == NOTHING_FITS_THERE:
        state, code = State.NOTHING_FITS, EXIT_NOTHING_FITS
    return RayJob(
        id=details.submission_id or details.job_id or "",
        state=state,
        space=metadata.get("space", ""),
        gpu=metadata.get("gpu", ""),
        submitted_by=metadata.get("user", ""),
        started_s=_seconds(details.start_time),
        ended_s=_seconds(details.end_time),
        exit_code=code,
        message=details.message or "",
    )


def _seconds(time_ms: int | None) -> float | None:
    """A time that a server gives. Raises ValueError for what no clock shows."""
    if not time_ms:
        return None
    if not 0 < time_ms < _LAST_MS:
        raise ValueError(f"{time_ms} is no time in milliseconds")
    return time_ms / 1000


_LAST_MS = 253_402_300_800_000
"""The end of the year 9999."""


def _short(error: Exception) -> str:
    """The first lines of what a server said; it may send a whole traceback."""
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:400]} ..."
