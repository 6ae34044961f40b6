"""Finds search spaces by name: in ./search_spaces, in the package, in the source tree."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tuner.core.errors import InputError, unknown
from tuner.core.files import shipped_places
from tuner.space.document import read_text
from tuner.space.format import read_space
from tuner.space.searchspace import SearchSpace, complete_space

_SUFFIXES = (".yaml", ".yml")
_OWN_FOLDERS = shipped_places("search_spaces", "search_spaces")
DEFAULT_WORKLOAD = "causal_lm"


@dataclass(frozen=True, slots=True)
class SpaceInfo:
    """One search space that was found. `problem` says what is wrong where it cannot be read."""

    name: str
    path: Path
    description: str = ""
    model: str | None = None
    configurations: int | None = None
    problem: InputError | None = None


def load_space(name_or_path: str) -> SearchSpace:
    """The search space of that name, or in that YAML file.

    Raises `InputError`, with the nearest spelling, if there is none, and with everything that
    is wrong if the file is malformed.
    """
    if name_or_path.endswith(_SUFFIXES) or "/" in name_or_path or "\\" in name_or_path:
        return _load_file(Path(name_or_path))
    found = _find()
    if name_or_path not in found:
        files = (Path(name_or_path + suffix) for suffix in _SUFFIXES)
        if file := next(filter(os.path.isfile, files), None):  # false for any text
            hint = f"did you mean the file here? --space {file}"
            raise InputError(f"unknown search space {name_or_path!r}", hint=hint)
        raise unknown("search space", name_or_path, found, list_command="tuner spaces")
    return _load_file(found[name_or_path])


def list_spaces() -> list[SpaceInfo]:
    """Every search space that can be named, by name; broken files are listed with the problem."""
    return [_info(name, path) for name, path in sorted(_find().items())]


def default_space(model: str, settings: Collection[str] = ()) -> SearchSpace:
    """A space of one configuration for `tuner estimate --model`: the vocabulary's defaults.

    `settings` are the names that the user sets: a value that otherwise follows from others
    (grad_accum from effective_batch, lora_alpha from lora_rank) is then free to be set, and
    setting grad_accum makes the effective batch follow from it.
    """
    empty = SearchSpace(
        name="default",
        workload=DEFAULT_WORKLOAD,
        description="defaults of the workload",
        model=model,
    )
    given = {n: empty.terms[n].default for n in settings if n in empty.terms}
    return complete_space(dataclasses.replace(empty, fixed=given))


def space_folders() -> list[Path]:
    """The folders of search spaces; the first match counts."""
    return [Path("search_spaces"), *_OWN_FOLDERS]


def is_shipped(space: SearchSpace) -> bool:
    """True if the space comes with tuner."""
    return space.path is not None and space.path.resolve().parent in _OWN_FOLDERS


def _find() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in _files():
        found.setdefault(path.stem, path)
    return found


def _files() -> Iterator[Path]:
    for folder in space_folders():
        try:
            paths = sorted(folder.iterdir()) if folder.is_dir() else []
        except PermissionError:
            continue  # a folder that may not be read holds no spaces for this user
        yield from (path for path in paths if path.suffix in _SUFFIXES)


def _load_file(path: Path) -> SearchSpace:
    return read_space(read_text(path), path.name, path=path)


def _info(name: str, path: Path) -> SpaceInfo:
    try:
        space = _load_file(path)
    except InputError as error:
        return SpaceInfo(name, path, problem=error)
    return SpaceInfo(
        name,
        path,
        description=space.description,
        model=space.model,
        configurations=space.count(use_floors=False),
    )
