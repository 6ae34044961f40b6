"""`tuner models`: the models that work offline, the architecture of one, and hollow checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from tuner.app.cli.helping import examples
from tuner.app.cli.options import json_option
from tuner.app.listener import quiet_libraries
from tuner.core.units import format_gib
from tuner.report.terminal.render import count, print_fields, print_json
from tuner.report.terminal.tables import print_rows
from tuner.space.models.catalogue import ModelEntry, get_entry, load_catalogue, unknown_model

_WRITTEN = (
    "id", "hub_id", "aliases", "task", "params", "layers", "hidden_size", "vocab_size", "source",
    "notes",
)  # fmt: skip
"""Facts of a model that --json has."""


class _ModelGroup(click.Group):
    """A group in which every word that is no subcommand is the name of a model, to print it."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """The subcommand, or one that prints the model `cmd_name`."""
        return super().get_command(ctx, cmd_name) or click.Command(
            cmd_name,
            callback=lambda as_json: _show(cmd_name, as_json or ctx.params["as_json"]),
            params=[click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")],
            hidden=True,
        )


@click.group(
    "models",
    cls=_ModelGroup,
    invoke_without_command=True,
    subcommand_metavar="[MODEL | hollow MODEL FOLDER]",
    epilog=examples(
        "tuner models",
        "tuner models mistral-7b-v0.3",
        "tuner models hollow llama-3.1-8b ./llama-3.1-8b",
    ),
)
@json_option
@click.pass_context
def command(ctx: click.Context, *, as_json: bool) -> None:
    """List the models that work offline, or print the architecture of one.

    --model also takes any other model of the hub and any folder with a config.json.
    """
    if ctx.invoked_subcommand is None:
        found = list(load_catalogue().values())
        print_json([_to_dict(entry) for entry in found]) if as_json else _print_all(found)


def _show(model: str, as_json: bool) -> None:
    entry = get_entry(model)
    if entry is None:
        raise unknown_model(model)
    print_json({**_to_dict(entry), "config": entry.config}) if as_json else _print_one(entry)


@command.command(
    "hollow",
    short_help="Write a checkpoint with holes in place of its weights.",
    epilog=examples("tuner models hollow llama-3.1-8b ./llama-3.1-8b"),
)
@click.argument("model")
@click.argument("folder", type=click.Path(path_type=Path))
@json_option
def hollow(*, model: str, folder: Path, as_json: bool) -> None:
    """Write a checkpoint of a model that takes no disk: holes in place of its weights.

    It has the names, shapes and types of the published one, and from_pretrained loads it; all
    weights are zero. For programs that run on an emulated device.
    """
    from tuner.space.models.hollow import write_hollow

    with quiet_libraries():
        found = write_hollow(model, folder)
    if as_json:
        print_json({**dataclasses.asdict(found), "folder": str(found.folder)})
    else:
        print_fields(
            [
                ("folder", str(found.folder)),
                ("model", found.model),
                ("parameters", f"{count(found.parameters)}, {found.dtype}, all zero"),
                ("weights", format_gib(found.logical_bytes)),
                ("on disk", f"{found.disk_bytes / 1e6:.1f} MB, tokenizer included"),
                ("tokenizer", found.tokenizer),
                ("processor", found.processor or ""),
            ]
        )


def _to_dict(entry: ModelEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in _WRITTEN}


def _print_all(found: list[ModelEntry]) -> None:
    numbers = ("parameters", "layers", "width", "vocabulary")
    print_rows(
        ["id", "task", *numbers],
        [
            (
                entry.id,
                entry.task,
                count(entry.params),
                count(entry.layers),
                count(entry.hidden_size),
                count(entry.vocab_size),
            )
            for entry in found
        ],
        right=numbers,
        drop=("layers", "width"),
    )


def _print_one(entry: ModelEntry) -> None:
    print_fields(
        [
            ("id", entry.id),
            ("hub", entry.hub_id or "only as a part of another model"),
            ("aliases", ", ".join(entry.aliases)),
            ("task", entry.task),
            ("parameters", count(entry.params)),
            ("layers", count(entry.layers)),
            ("width", count(entry.hidden_size)),
            ("vocabulary", count(entry.vocab_size)),
            ("source", entry.source),
            ("notes", entry.notes),
        ]
    )
