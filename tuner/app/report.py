"""Draws the files of a search again from its journal, without searching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tuner.app.target import Target, check_conditions, require_records
from tuner.app.writing import Contents, write_results
from tuner.core.errors import InputError, UnavailableError
from tuner.core.files import read_file
from tuner.report.other_gpus import MAX_BYTES
from tuner.searches.view import View


def redraw(targets: Sequence[Target], where: tuple[str, ...] = ()) -> list[View]:
    """Write table, recommendation, picture and report of each again; returns what they show.

    Nothing is traced and nothing is run: the numbers are those of the journal, and the memory over
    a step is shown where the search kept it for what is recommended now. Without `where` the
    conditions, the command and the notes of the search stay, as `best.yaml` holds them. Raises
    `UnavailableError` where one of them was not searched, and `InputError` for what is no
    condition; nothing is written then.
    """
    return write_results([_contents(target, where) for target in targets])


def _contents(target: Target, where: tuple[str, ...]) -> Contents:
    records = require_records(target)
    kept = _kept(target.folder.best_yaml)
    search = _mapping(kept.get("search"))
    conditions = where or _texts(_mapping(kept.get("chosen_from")).get("conditions"))
    return Contents(
        target,
        target.facts,
        records,
        {
            "where": lambda configuration: target.space.matches(configuration, conditions),
            "conditions": check_conditions(target, conditions),
            "command": "".join(_texts([search.get("command")])),
            "notes": _texts(search.get("notes")),
        },
        lambda best: None,
    )


def _kept(path: Path) -> Mapping[str, Any]:
    """What `best.yaml` of the search says; empty where there is none yet."""
    try:
        return _mapping(yaml.safe_load(read_file(path, MAX_BYTES)))
    except FileNotFoundError:
        return {}
    except (InputError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UnavailableError(
            f"cannot read {str(path)!r}: {error}", hint="remove it: the journal has all numbers"
        ) from error


def _texts(values: object) -> tuple[str, ...]:
    """The texts of a list; nothing else of it, as aliases of aliases would make gigabytes."""
    return tuple(v for v in values if isinstance(v, str)) if isinstance(values, list) else ()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
