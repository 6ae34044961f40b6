"""`tuner fetch`: the results of a search on a cluster come home."""

from __future__ import annotations

import secrets
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuner.cli.job_options import address_option, job_argument, last_lines, plain, state_text
from tuner.cli.options import examples, json_option, results_option
from tuner.cli.search import command as search
from tuner.engine.fetching import Choice, Fetched, take_home
from tuner.engine.job_files import JobFiles, JobRequest, check_id, unpack
from tuner.engine.quiet import quiet_libraries
from tuner.errors import InputError, UnavailableError
from tuner.space import parse_settings
from tuner.terminal.render import echo, print_json

if TYPE_CHECKING:
    from tuner.tune.jobs import JobServer, RayJob

PACK_WAIT_S = 300
"""How long the cluster may take to start a process and read a job's files."""

READER_LEFT_S = 60
"""How long the job that read them stays on the cluster's list at least."""


@click.command(
    "fetch",
    epilog=examples(
        "tuner fetch qlora27b-a6000-3f9a1c2b",
        "tuner fetch qlora27b-a6000-3f9a1c2b --results elsewhere",
    ),
)
@job_argument
@address_option
@results_option
@json_option
def command(*, job_id: str, address: str | None, results: Path, as_json: bool) -> None:
    """Fetch the trials of the search ID into the results folder, and rewrite its files.

    No trial is overwritten: new ones are appended to the journal. While the search runs, this
    fetches the finished trials; run it again for the rest.
    """
    from tuner.tune.jobs import connect  # Ray: seconds to import

    check_id(job_id)
    server = connect(address)
    job = _job(server, job_id)
    files = _packed(server, job_id, job)
    with quiet_libraries():
        found = take_home(files, results, _choice(files.request))
    if not found and job is not None and job.state.ended:
        raise _without_trials(server, job)
    if as_json:
        print_json({"id": job_id, "fetched": [_to_dict(each) for each in found]})
        return
    if job is not None and not job.state.ended:
        echo(f"{job_id} is still running: these are its trials so far", err=True)
    for each in found:
        _print(each)
    if not found:
        echo("no trial has finished yet")


def _job(server: JobServer, job_id: str) -> RayJob | None:
    """The job; None where the cluster forgot it, whose disk may still have its files."""
    try:
        return server.job(job_id)
    except InputError:
        return None


def _packed(server: JobServer, job_id: str, job: RayJob | None) -> JobFiles:
    """The files of the job, read by a short job of ours on the head node."""
    from tuner.tune.jobs import FETCH, KIND, State

    reader = f"fetch-{secrets.token_hex(4)}-{job_id}"[:119]
    server.submit(
        reader, shlex.join(["tuner", "cluster-job", "pack", job_id]), metadata={KIND: FETCH}
    )
    read = server.wait(reader, PACK_WAIT_S)
    if not read.state.ended:
        raise UnavailableError(
            f"the cluster did not read the files of {job_id!r} within {PACK_WAIT_S} s",
            hint="its head node may be busy; try again",
        )
    text = server.logs(reader)
    if read.ended_s is not None:
        server.tidy(read.ended_s - READER_LEFT_S)
    files = unpack(text.splitlines(), job_id)
    if files is not None:
        return files
    if job is not None and job.state is State.FAILED:
        raise _without_trials(server, job)
    if job is None and read.exit_code == InputError.exit_code:
        return _unknown(server, job_id)
    hint = "`tuner` must be on the PATH with which Ray was started on the head node"
    raise UnavailableError(
        f"the cluster has no files of {job_id!r}:\n{last_lines(text) or plain(read.message)}",
        hint=hint if read.exit_code == 127 else None,
    )


def _unknown(server: JobServer, job_id: str) -> JobFiles:
    raise InputError(
        f"the cluster at {server.address} knows no job {job_id!r}, and has no files of it",
        hint="`tuner jobs` lists those that it knows",
    )


def _without_trials(server: JobServer, job: RayJob) -> UnavailableError:
    """Why a job that ended left nothing, in its own words."""
    return UnavailableError(
        f"{job.id!r} left no trial: {state_text(job)}. The end of what it printed:\n"
        + last_lines(server.logs(job.id)),
        hint=f"`tuner logs {job.id}` prints all of it",
    )


def _choice(request: JobRequest) -> Choice:
    """What the job was told, as `tuner search` reads it."""
    try:
        given: dict[str, Any] = search.make_context("search", list(request.arguments)).params
    except (click.ClickException, click.exceptions.Exit) as error:
        raise UnavailableError(
            f"this version of tuner cannot read what {request.id!r} was told: "
            + plain(shlex.join(request.arguments))
        ) from error
    return Choice(
        space_name=given["space_name"],
        model=given["model"],
        gpu_memory=given["gpu_memory"],
        price=given["price"],
        where=given["where"],
        settings=parse_settings(given["settings"]),
        objectives=given["objectives"],
    )


def _to_dict(fetched: Fetched) -> dict[str, Any]:
    view = fetched.view
    return {
        "folder": str(fetched.folder.path),
        "space": fetched.folder.space,
        "gpu": fetched.folder.gpu,
        "trials": fetched.total,
        "added": fetched.added,
        "best": view.best.to_dict() if view is not None and view.best else None,
        "note": fetched.note,
    }


def _print_state(job: RayJob) -> None:
    """What is to be known of a search that did not end by itself."""
    from tuner.tune.jobs import State

    if not job.state.ended:
        echo(f"{job.id} still runs: these are its trials until now", err=True)
    elif job.state in (State.FAILED, State.STOPPED):
        echo(
            f"{job.id} {state_text(job)}: these are its trials until then, and "
            f"`tuner logs {job.id}` says more",
            err=True,
        )


def _print(fetched: Fetched) -> None:
    folder = fetched.folder
    echo(f"{folder.path}/: {fetched.total} trials of the job, {fetched.added} new here")
    if fetched.note:
        echo(f"  the journal only: {fetched.note}", err=True)
    elif fetched.view is not None and fetched.view.best is None:
        echo("  no tried configuration fits")
    else:
        echo(f"  `tuner best --space {folder.space} --gpu {folder.gpu}` prints the best")
