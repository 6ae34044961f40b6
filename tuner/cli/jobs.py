"""`tuner jobs`: the searches that a cluster runs or has run."""

from __future__ import annotations

from datetime import datetime

import click

from tuner.cli.job_options import address_option, plain, state_text, to_dict
from tuner.cli.options import examples, json_option
from tuner.terminal.render import echo, print_json
from tuner.terminal.tables import print_rows
from tuner.units import format_duration


@click.command(
    "jobs",
    epilog=examples("tuner jobs", "tuner jobs --address http://head:8265 --json"),
)
@address_option
@json_option
def command(*, address: str | None, as_json: bool) -> None:
    """List the searches of a cluster, newest first.

    The cluster forgets them when its head node restarts; their results stay on its disk.
    """
    from tuner.tune.jobs import connect  # Ray: seconds to import

    server = connect(address)
    found = server.jobs()
    if as_json:
        print_json([to_dict(job) for job in found])
        return
    if not found:
        echo(f"the cluster at {server.address} has no searches yet")
        return
    rows = []
    for job in found:
        started = ended = ""
        if job.started_s is not None:
            started = datetime.fromtimestamp(job.started_s).strftime("%m-%d %H:%M")
            if job.ended_s is not None:
                ended = format_duration(max(0.0, job.ended_s - job.started_s))
        texts = (job.id, state_text(job), job.space, job.gpu, job.submitted_by)
        rows.append((*map(plain, texts), started, ended))
    columns = ["id", "state", "space", "GPU", "by", "started", "took"]
    print_rows(columns, rows, right=("took",), drop=("by", "started", "took"))
