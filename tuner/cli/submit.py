"""`tuner submit`: sends a search to a Ray cluster, which runs it without this machine."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tuner.cli.job_options import address_option
from tuner.cli.options import RareOption, SizeType, examples, json_option
from tuner.cli.search import command as search
from tuner.engine.job_files import check_id, user_name
from tuner.engine.measuring import Mode
from tuner.engine.plan import SearchOptions
from tuner.engine.submission import (
    RequestedGpu,
    asked_for,
    check_asked,
    new_id,
    put_together,
    space_in,
)
from tuner.engine.target import Target
from tuner.engine.targets import gpu_names
from tuner.errors import InputError
from tuner.space import load_space, parse_settings
from tuner.terminal.render import echo, print_json

NOT_SENT = {
    "results",
    "address",
    "dry_run",
    "study",
    "metrics_port",
    "dashboard",
    "track",
    "fresh",
    "quiet",
    "as_json",
}
"""Options of `tuner search` that are about the machine on which it is typed."""

_SHARED = [param for param in search.params if param.name not in NOT_SENT]
_RAW = "tuner.submit.raw"


class _Submit(click.Command):
    """Keeps what was typed for the options of `tuner search`, to be typed again elsewhere."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_RAW] = self.make_parser(ctx).parse_args(list(args))[0]
        return super().parse_args(ctx, args)


def search_arguments(raw: Mapping[str, Any]) -> list[str]:
    """What was typed of the options of `tuner search`, but for the space; `raw` is unconverted."""
    found: list[str] = []
    for param in _SHARED:
        value = raw.get(param.name or "")
        if value is None or param.name == "space_name":
            continue
        if isinstance(param, click.Option) and param.is_flag:
            found.append(param.opts[0])
            continue
        for text in value if isinstance(value, list | tuple) else [value]:
            found += [f"{param.opts[0]}={text}"] if text.startswith("-") else [param.opts[0], text]
    return found


@click.command(
    "submit",
    cls=_Submit,
    epilog=examples(
        "tuner submit --space qlora27b --gpu a6000",
        "tuner submit --space qlora27b --gpu a6000 --address http://head:8265",
        "tuner submit --space mine.yaml --gpu a6000 --working-dir .    # own code",
    ),
)
@click.option(
    "--working-dir",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder of your own training code, sent with the job but for what .gitignore names.",
)
@click.option(
    "--allow",
    cls=RareOption,
    type=click.Choice(["secrets", "links"]),
    multiple=True,
    help="Send files, too, that look like secrets, or that links out of the folder lead to.",
)
@click.option(
    "--max-size",
    cls=RareOption,
    type=SizeType(),
    metavar="SIZE",
    help="Send no more of the folder.  [default: 200MiB]",
)
@click.option(
    "--id",
    "job_id",
    metavar="ID",
    help="Job id.  [default: space, GPU type and a number]",
)
@address_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    address: str | None,
    working_dir: Path | None,
    job_id: str | None,
    allow: tuple[str, ...],
    max_size: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Send a search to a Ray cluster, which runs it without this machine.

    The options are those of `tuner search`, and are checked here first. The space's file is sent
    with the job; if the space runs your own code, so is the folder of --working-dir: what goes is
    listed. Prints the job's id for the commands jobs, logs, stop and fetch.
    """
    asked = _checked(options)
    target, gpus = asked[0].targets[0], list(dict.fromkeys(one.label for one in asked))
    chosen = check_id(job_id or new_id(target.space.name, gpus))
    about = {"space": target.space.name, "gpu": ",".join(gpus), "user": user_name()}
    typed = search_arguments(ctx.meta[_RAW])
    from tuner.tune.jobs import connect  # Ray: seconds to import

    with tempfile.TemporaryDirectory(prefix="tuner-") as scratch:
        folder = Path(scratch) if working_dir is None else working_dir
        space = _placed(target, options, folder, whole=working_dir is not None)
        if working_dir is not None:
            allowed: dict[str, Any] = dict.fromkeys(allow, True)
            allowed |= {} if max_size is None else {"max_bytes": max_size}
            folder = _packed(working_dir, Path(scratch), space, **allowed)
        server = connect(address)
        _send(server, chosen, ["--space", space, *typed], about, folder)
    if as_json:
        print_json({"id": chosen, "address": server.address, **about})
        return
    echo(chosen)
    for one in asked:
        if not one.settled:
            echo(f"{one.name} is {one.choices_text}, whichever the cluster offers", err=True)
    more = "" if address is None else f" --address {shlex.quote(address)}"
    echo(f"see `tuner logs {chosen} --follow{more}`, `tuner fetch {chosen}{more}`", err=True)


def _checked(options: Mapping[str, Any]) -> list[RequestedGpu]:
    """What is to be searched for each GPU type that was named, all of it checked."""
    given = dict(options)
    selected = {name: given.pop(name) for name in ("model", "gpu_memory", "price")}
    space, names = given.pop("space_name"), gpu_names(given.pop("gpu_name"))
    mode, settings = Mode(given.pop("mode")), parse_settings(given.pop("settings"))
    # Nothing is written; but nothing that is in ./results may be in the way either.
    with tempfile.TemporaryDirectory(prefix="tuner-") as scratch:
        asked = asked_for(space, names, Path(scratch), **selected)
        check_asked(asked, SearchOptions(mode=mode, settings=settings, **given))
    return asked


def _placed(target: Target, options: Mapping[str, Any], folder: Path, *, whole: bool) -> str:
    """Put what the search reads into `folder`; how `--space` names the space there."""
    own = load_space(options["space_name"])  # as the file has it, without --model
    if whole:
        return space_in(folder, options["space_name"], own)
    return put_together(own, options["model"], folder)


def _packed(working_dir: Path, scratch: Path, space: str, **allowed: Any) -> Path:
    """The archive of what goes along of `working_dir`, after saying what that is."""
    from tuner.tune.working_dir import collect  # Ray: seconds to import

    package = collect(working_dir, **allowed)
    if space.startswith("./") and space[2:] not in {file.name for file in package.files}:
        raise InputError(
            f"the space's file {space} is left out of what is sent",
            hint="no .gitignore or .rayignore may name it",
        )
    for line in package.lines():
        echo(line, err=True)
    package.write(archive := scratch / "working_dir.zip")
    return archive


def _send(
    server: Any, job_id: str, arguments: Sequence[str], about: Mapping[str, str], folder: Path
) -> None:
    from tuner.tune.jobs import KIND, SEARCH

    command = ["tuner", "cluster-job", "run", job_id, "--user", about["user"]]
    command += ["--about", about["space"], about["gpu"], "--", *arguments]
    server.submit(job_id, shlex.join(command), metadata={KIND: SEARCH, **about}, folder=folder)


command.params = [*_SHARED, *command.params]
