"""`tuner cluster-job`: the side of `tuner submit` and `tuner fetch` that runs on the cluster.

Not for people: the commands that a job server is given.
"""

from __future__ import annotations

from pathlib import Path

import click

from tuner.cli.main import run
from tuner.cli.search import command as search
from tuner.engine.job_files import new_request, open_folder, pack
from tuner.errors import EXIT_NOTHING_FITS


@click.group("cluster-job", hidden=True)
def command() -> None:
    """Runs on a cluster what `tuner submit` and `tuner fetch` ask for."""


@command.command("run", context_settings={"ignore_unknown_options": True})
@click.argument("job_id")
@click.option("--user", default="")
@click.option("--about", nargs=2, default=("", ""))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_job(*, job_id: str, user: str, about: tuple[str, str], arguments: tuple[str, ...]) -> int:
    """Search with ARGUMENTS on the cluster that this machine is in, in a folder of the job's own.

    The exit code is that of the search, but for the one of "nothing fits".
    """
    space, gpu = about
    request = new_request(job_id, arguments, space=space, gpu=gpu, submitted_by=user)
    typed = search.make_context("search", list(arguments)).params["space_name"]
    file = Path(typed)
    folder = open_folder(request, file if file.is_file() else None)
    results = ["--results", str(folder / "results")]
    code = run(["search", *arguments, "--address", "auto", *results])
    from tuner.tune.jobs import NOTHING_FITS_THERE  # with Ray, which the search has imported

    return NOTHING_FITS_THERE if code == EXIT_NOTHING_FITS else code


@command.command("pack")
@click.argument("job_id")
def pack_job(*, job_id: str) -> None:
    """Print the files of a job for `tuner fetch`."""
    for line in pack(job_id):
        click.echo(line)
