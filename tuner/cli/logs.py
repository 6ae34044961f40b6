"""`tuner logs`: what a search on a cluster has printed."""

from __future__ import annotations

import click

from tuner.cli.job_options import address_option, job_argument, plain, state_text
from tuner.cli.options import examples
from tuner.engine.job_files import check_id


@click.command(
    "logs",
    epilog=examples("tuner logs qlora27b-a6000-3f9a1c2b --follow"),
)
@job_argument
@click.option("--follow", "-f", is_flag=True, help="Continue until the search ends.")
@address_option
def command(*, job_id: str, follow: bool, address: str | None) -> None:
    """Print the output of the search ID so far.

    Ctrl-C stops the printing, not the search: `tuner stop` does that.
    """
    from tuner.tune.jobs import connect  # Ray: seconds to import

    check_id(job_id)
    server = connect(address)
    if follow:
        for text in server.follow(job_id):
            click.echo(plain(text), nl=False)
    else:
        click.echo(plain(server.logs(job_id)), nl=False)
    job = server.job(job_id)
    click.echo(f"{job_id}: {state_text(job)}", err=True)
