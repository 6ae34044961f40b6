"""`tuner models`: the models that work offline, or the architecture of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tuner.cli.options import examples, json_option

if TYPE_CHECKING:
    from tuner.models.catalogue import ModelEntry


@click.command(
    "models",
    short_help="List the models that work offline, or print one.",
    epilog=examples(
        "tuner models",
        "tuner models mistral-7b-v0.3",
    ),
)
@click.argument("model", metavar="[MODEL]", required=False)
@json_option
def command(*, model: str | None, as_json: bool) -> None:
    """List the models that work offline, or print the architecture of one.

    Any other model of the hub, and any folder with a config.json, can be named with --model.
    """
    from tuner.cli.render import print_json
    from tuner.errors import unknown
    from tuner.models.catalogue import get_entry, load_catalogue

    if model is None:
        found = list(load_catalogue().values())
        print_json([_to_dict(entry) for entry in found]) if as_json else _print_all(found)
        return
    entry = get_entry(model)
    if entry is None:
        names = {name for known in load_catalogue().values() for name in known.names}
        raise unknown("model", model, names, list_command="tuner models")
    print_json({**_to_dict(entry), "config": entry.config}) if as_json else _print_one(entry)


def _to_dict(entry: ModelEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "hub_id": entry.hub_id,
        "aliases": list(entry.aliases),
        "task": entry.task,
        "params": entry.params,
        "layers": entry.layers,
        "hidden_size": entry.hidden_size,
        "vocab_size": entry.vocab_size,
        "source": entry.source,
        "notes": entry.notes,
    }


def _print_all(found: list[ModelEntry]) -> None:
    from tuner.cli.render import count, print_rows

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
    )


def _print_one(entry: ModelEntry) -> None:
    from tuner.cli.render import count, print_fields

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
