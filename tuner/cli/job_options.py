"""What the commands about jobs on a cluster share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tuner.tune.jobs import RayJob

address_option = click.option(
    "--address",
    metavar="URL",
    help="Job server of the Ray cluster: its dashboard.  [default: RAY_API_SERVER_ADDRESS, or "
    "http://127.0.0.1:8265]",
)

job_argument = click.argument("job_id", metavar="ID")

LAST_LINES = 15
"""How much of a failed job's output is shown."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """`text` of a cluster without what would steer the terminal; what drew over a line is one."""
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def last_lines(text: str, number: int = LAST_LINES) -> str:
    """The last lines of a job's output, indented."""
    lines = [line for line in plain(text).splitlines() if line.strip()]
    return "\n".join(f"  {line}" for line in lines[-number:])


def state_text(job: RayJob) -> str:
    """What became of it, for people."""
    from tuner.tune.jobs import State

    if job.state is State.FAILED and job.exit_code is not None:
        return f"failed (exit {job.exit_code})"
    return str(job.state)


def to_dict(job: RayJob) -> dict[str, object]:
    """JSON types only; times are seconds since 1970."""
    return {
        "id": job.id,
        "state": str(job.state),
        "space": job.space,
        "gpu": job.gpu,
        "submitted_by": job.submitted_by,
        "started_s": job.started_s,
        "ended_s": job.ended_s,
        "exit_code": job.exit_code,
    }
