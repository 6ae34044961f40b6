"""`tuner spaces`: the search spaces that can be named, or what one of them holds."""

from __future__ import annotations

from typing import Any

import click

from tuner.app.cli.options import examples, json_option
from tuner.core.expressions import all_of, show
from tuner.report.terminal.render import count, echo, print_fields, print_json
from tuner.report.terminal.tables import print_rows
from tuner.space import SearchSpace, SpaceInfo, list_spaces, load_space


@click.command(
    "spaces",
    epilog=examples(
        "tuner spaces",
        "tuner spaces qlora27b",
    ),
)
@click.argument("space_name", metavar="[SPACE]", required=False)
@json_option
def command(*, space_name: str | None, as_json: bool) -> None:
    """List the search spaces, or print one: its knobs, rules, floors and data.

    Spaces are found in ./search_spaces and among those that ship with tuner; name other YAML files
    by path.
    """
    if space_name is not None:
        space = load_space(space_name)
        if as_json:
            print_json({**space.to_dict(), **_counts(space)})
        else:
            _print_one(space)
        return
    found = list_spaces()
    print_json([_to_dict(info) for info in found]) if as_json else _print_all(found)


def _counts(space: SearchSpace) -> dict[str, int]:
    return {
        "configurations": space.count(use_floors=False),
        "configurations_within_floors": space.count(),
    }


def _to_dict(info: SpaceInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "path": str(info.path),
        "description": info.description,
        "model": info.model,
        "configurations": info.configurations,
        "problem": str(info.problem) if info.problem else None,
    }


def _print_all(found: list[SpaceInfo]) -> None:
    print_rows(
        ["name", "configurations", "model", "description"],
        [
            (
                info.name,
                "broken" if info.problem else count(info.configurations),
                info.model or "",
                info.problem.message if info.problem else info.description,
            )
            for info in found
        ],
        right=("configurations",),
        drop=("model",),
    )
    if not found:
        echo("no search space is found", err=True)


def _print_one(space: SearchSpace) -> None:
    counts = _counts(space)
    data = space.data
    print_fields(
        [
            ("name", space.name),
            ("about", space.description),
            ("file", str(space.path) if space.path else ""),
            ("workload", space.workload),
            ("model", space.model or ("given with --model" if space.predictable else "")),
            ("command", str(space.command or "")),
            ("written for", ", ".join(space.gpus)),
            ("examples", count(data.examples) if data.examples is not None else ""),
            ("epochs", f"{data.epochs:g}" if data.epochs is not None else ""),
            (
                "configurations",
                f"{count(counts['configurations'])}, of which "
                f"{count(counts['configurations_within_floors'])} within the floors",
            ),
            ("floors", all_of(space.floors)),
            ("constraints", all_of(space.constraints)),
            ("objectives", ", ".join(f"{o.direction} {o.metric}" for o in space.objectives)),
        ]
    )
    for title, pairs in (
        ("knobs", [(n, ", ".join(map(show, values))) for n, values in space.choices.items()]),
        ("held fixed", [(name, show(value)) for name, value in space.fixed.items()]),
        ("derived", list(space.derived.items())),
        ("baseline", [(n, show(v)) for n, v in (space.baseline or {}).items()]),
        (
            "stages",
            [
                (stage.name, ", ".join(f"{n}={show(v)}" for n, v in stage.values.items()))
                for stage in space.stages
            ],
        ),
    ):
        if pairs:
            echo(f"\n{title}")
            print_fields(pairs, indent=2)
