"""`tuner stop`: ends a search on a cluster."""

from __future__ import annotations

import click

from tuner.cli.job_options import address_option, job_argument, state_text
from tuner.cli.options import examples
from tuner.engine.job_files import check_id
from tuner.errors import UnavailableError
from tuner.terminal.render import echo


@click.command(
    "stop",
    epilog=examples("tuner stop qlora27b-a6000-3f9a1c2b"),
)
@job_argument
@address_option
def command(*, job_id: str, address: str | None) -> None:
    """Stop the search ID: running trials are interrupted, finished ones stay in its results.

    Returns when the search has ended. A finished search stays as it is.
    """
    from tuner.tune.jobs import STOP_WAIT_S, connect  # Ray: seconds to import

    check_id(job_id)
    server = connect(address)
    job = server.job(job_id)
    if job.state.ended:
        echo(f"{job_id}: {state_text(job)} already")
        return
    server.stop(job_id)
    # Ray ends it by force after the time that it was given; some seconds are for Ray itself.
    job = server.wait(job_id, STOP_WAIT_S + 30)
    if not job.state.ended:
        raise UnavailableError(
            f"{job_id!r} does not end", hint="`tuner logs` says what it does; try again"
        )
    echo(f"{job_id}: {state_text(job)}")
