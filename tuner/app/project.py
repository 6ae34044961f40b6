"""The settings of a project for `tuner review`: `[tool.tuner]` of pyproject.toml, or tuner.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tuner.core.errors import InputError, Problem, unknown
from tuner.core.files import read_file
from tuner.core.records import KnobValue
from tuner.core.setup.schemas import SCHEMAS
from tuner.program.vocabulary import understood
from tuner.space.gpus import get_gpu
from tuner.space.load import DEFAULT_WORKLOAD

OWN_FILE, SHARED_FILE = "tuner.toml", "pyproject.toml"
_MOST_BYTES = 1 << 20
_EXAMPLE = 'in pyproject.toml: [tool.tuner] and below it gpu = ["rtx4090"]'


@dataclass(frozen=True, slots=True)
class Project:
    """The settings of a project.

    `gpus` are the GPU types that every program has to fit, `margin` is memory to keep free ("3%"),
    `models` the model and `settings` other values by path or glob, for programs that don't name
    them, `programs` commands in place of the changed files, and `exclude` paths or globs that are
    not programs.
    """

    gpus: tuple[str, ...] = ()
    margin: str | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, KnobValue]] = field(default_factory=dict)
    programs: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def model_of(self, path: str) -> str | None:
        """The model of the first glob that matches `path`; None without one."""
        return next((m for glob, m in self.models.items() if fnmatchcase(path, glob)), None)

    def settings_of(self, path: str) -> Mapping[str, KnobValue]:
        """The settings of the first glob that matches `path`; none without one."""
        return next((s for glob, s in self.settings.items() if fnmatchcase(path, glob)), {})

    def excludes(self, path: str) -> bool:
        """True if a glob of `exclude` matches `path`."""
        return any(fnmatchcase(path, glob) for glob in self.exclude)


def read_project(folder: Path) -> Project:
    """The settings of the project in `folder`; empty ones without a table.

    Raises one `InputError` with every key and value that is wrong, and for two tables.
    """
    own, shared = _table(folder / OWN_FILE), _table(folder / SHARED_FILE)
    tables = {OWN_FILE: own} if own is not None else {}
    if shared is not None and "tuner" in shared.get("tool", {}):
        tables[f"{SHARED_FILE} [tool.tuner]"] = shared["tool"]["tuner"]
    if len(tables) > 1:
        raise InputError(
            f"the settings of tuner are in {' and in '.join(tables)}", hint="keep one of them"
        )
    for where, table in tables.items():
        return _read(table, where)
    return Project()


def _table(path: Path) -> dict[str, Any] | None:
    try:
        return tomllib.loads(read_file(path, _MOST_BYTES).decode())
    except FileNotFoundError:
        return None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from error


_WANTED = {
    "gpu": "a GPU type or a list of them",
    "margin": 'a text such as "3%" or "2GiB"',
    "models": 'a table of path or glob to model, such as "train/*.py" = "qwen3-8b"',
    "set": 'a table of path or glob to settings, such as "train/*.py" = {max_length = 1024}',
    "programs": "a list of commands",
    "exclude": "a list of paths or globs",
}
"""The keys, and what their values have to be."""


def _read(table: object, where: str) -> Project:
    if not isinstance(table, dict):
        raise InputError(f"{where} is not a table", hint=_EXAMPLE)
    problems = [
        Problem(f"{error.message}; {error.hint}", where)
        for key in table.keys() - _WANTED.keys()
        for error in (unknown("key", key, _WANTED),)
    ]
    values = {key: value for key, value in table.items() if key in _WANTED}
    if isinstance(values.get("gpu"), str):
        values["gpu"] = [values["gpu"]]
    for key, value in values.items():
        if not _is_right(key, value):
            problems.append(Problem(f"{key} = {value!r} is not {_WANTED[key]}", where))
            continue
        try:
            _look_up(key, value)
        except InputError as error:
            problems.append(Problem(f"{key}: {error.message}; {error.hint}", where))
    if problems:
        raise InputError("the settings of tuner are wrong", problems=problems)
    lists = {key: tuple(values.get(key, ())) for key in ("gpu", "programs", "exclude")}
    return Project(
        lists["gpu"],
        values.get("margin"),
        values.get("models", {}),
        values.get("set", {}),
        lists["programs"],
        lists["exclude"],
    )


def _is_right(key: str, value: object) -> bool:
    if key == "margin":
        return isinstance(value, str)
    if key in ("models", "set"):
        kind = str if key == "models" else dict
        return isinstance(value, dict) and all(isinstance(one, kind) for one in value.values())
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _look_up(key: str, value: Any) -> None:
    """Raise `InputError` for an unknown GPU type, or for a setting that no training has."""
    for name in value if key == "gpu" else ():
        get_gpu(name)
    for settings in value.values() if key == "set" else ():
        understood(settings, SCHEMAS[DEFAULT_WORKLOAD].terms)


def require_gpus(project: Project) -> None:
    """Raise `InputError` where no GPU type is named."""
    if not project.gpus:
        raise InputError("no GPU type is named", hint=f"{_EXAMPLE}; or --gpu rtx4090")
