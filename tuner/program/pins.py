"""The releases that the environment of a program pins: lock files, requirements, an interpreter."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from tuner.core.files import read_file
from tuner.program.program import Program

_LOCKS = ("uv.lock", "poetry.lock", "pdm.lock")
_PROJECT = "pyproject.toml"
_ENVIRONMENTS = (".venv", "venv")
_ROOT_MARKS = (".git", _PROJECT, *_LOCKS)
_MOST_BYTES = 8 << 20
"""The largest file of pins; lock files of large projects have a few MiB."""


@dataclass(frozen=True, slots=True)
class Pins:
    """The `releases` that one file or environment pins: specifiers ("==4.45.2") by library."""

    path: Path
    releases: Mapping[str, str]


def pins_of(path: Path, libraries: Collection[str]) -> Pins:
    """The pins of these libraries in a file, or in an environment's folder or interpreter.

    A file is a lock file, a pyproject.toml or requirements; a malformed one raises anything.
    """
    folder = _site_packages(path)
    if folder is not None:
        there = [d for d in metadata.distributions(path=[str(folder)]) if d.name and d.version]
        versions = {str(canonicalize_name(d.name)): f"=={d.version}" for d in there}
        return Pins(path, {name: versions[name] for name in libraries if name in versions})
    text = read_file(path, _MOST_BYTES).decode()
    if path.suffix in (".toml", ".lock"):
        found = list(_of_toml(tomllib.loads(text)))
    else:
        found = list(_of_requirements(path, text, {path}))
    releases: dict[str, str] = {}
    for one in found:
        name = canonicalize_name(one.name)
        if name in libraries and one.specifier and (one.marker is None or one.marker.evaluate()):
            releases.setdefault(name, str(one.specifier))
    return Pins(path, releases)


def pins_near(program: Program, libraries: Collection[str]) -> list[Pins]:
    """The pins of the program's environment, those that count most first.

    They are a note on the answer, which a file or an environment that can't be read never costs.
    They are those of the interpreter that starts it, of the active environment, and up to the root
    of its project of lock files, environments, requirements and pyproject.toml.
    """
    places = [
        *_interpreters(program),
        *(path for folder in _folders(program) for path in _files_of(folder)),
    ]
    found = []
    for path in dict.fromkeys(places):
        try:
            pins = pins_of(path, libraries)
        except Exception:  # noqa: BLE001, S112 - see above
            continue
        if pins.releases:
            found.append(pins)
    return found


def _site_packages(path: Path) -> Path | None:
    """The packages of an environment's folder or interpreter; None for any other path."""
    if path.is_file():
        if not os.access(path, os.X_OK) or not path.name.startswith("python"):
            return None
        path = path.absolute().parent.parent  # a link makes an environment: it is not followed
    inside = [*sorted(path.glob("lib/python3*/site-packages")), path / "Lib" / "site-packages"]
    return next((folder for folder in inside if folder.is_dir()), None)


def _interpreters(program: Program) -> Iterator[Path]:
    command = Path(program.command[0]).absolute() if program.command else Path()
    own = Path(sys.prefix)
    if command.name.startswith("python") and _is_other(command.parent.parent, own):
        yield command.parent.parent
    active = os.environ.get("VIRTUAL_ENV")
    if active and _is_other(Path(active), own):
        yield Path(active)


def _is_other(folder: Path, own: Path) -> bool:
    return (folder / "pyvenv.cfg").is_file() and folder.resolve() != own.resolve()


def _folders(program: Program) -> list[Path]:
    """The folder of the program, and those above it up to the root of its project."""
    source = next(iter(program.sources), None)
    start = source.path.resolve().parent if source is not None else program.folder.resolve()
    for number, folder in enumerate((start, *start.parents)):
        if any((folder / mark).exists() for mark in _ROOT_MARKS):
            return [start, *start.parents][: number + 1]
        if str(folder) == os.path.expanduser("~"):  # noqa: PTH111 - Path.home() may raise
            break
    return [start]


def _files_of(folder: Path) -> Iterator[Path]:
    """Files and environments of a folder, those that pin most exactly first."""
    yield from (folder / name for name in _LOCKS if (folder / name).is_file())
    own = Path(sys.prefix)
    yield from (folder / name for name in _ENVIRONMENTS if _is_other(folder / name, own))
    requirements = sorted(folder.glob("requirements*.txt"), key=lambda path: len(path.name))
    yield from requirements
    yield from (path for path in (folder / _PROJECT,) if path.is_file())


def _of_toml(read: Mapping[str, Any]) -> Iterator[Requirement]:
    """The packages of a lock file, or the dependencies of a project."""
    packages = read.get("package")
    for package in packages if isinstance(packages, list) else ():
        if "name" in package and "version" in package:
            yield from _parsed(f"{package['name']}=={package['version']}")
    project = read.get("project", {})
    optional = project.get("optional-dependencies", {}).values()
    groups = read.get("dependency-groups", {}).values()
    for names in (project.get("dependencies", ()), *groups, *optional):
        for text in names:
            yield from _parsed(text) if isinstance(text, str) else ()


def _of_requirements(path: Path, text: str, read: set[Path]) -> Iterator[Requirement]:
    for written in text.replace("\\\n", " ").splitlines():
        line = written.split(" #")[0].strip()
        option, _, named = line.partition(" ")
        if option in ("-r", "--requirement"):
            other = Path(os.path.realpath(path.parent / named.strip()))
            if other not in read and other.is_file():
                read.add(other)
                content = read_file(other, _MOST_BYTES).decode(errors="replace")
                yield from _of_requirements(other, content, read)
        elif line and not line.startswith(("-", "#")):
            yield from _parsed(line.split(" --hash")[0])


def _parsed(text: str) -> Iterator[Requirement]:
    try:
        yield Requirement(text)
    except InvalidRequirement:
        return  # a path, an address, or a specifier of Poetry's own
