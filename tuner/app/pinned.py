"""Notes on a prediction whose releases are not those that the program's environment pins."""

from __future__ import annotations

import contextlib
import json
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
from packaging.version import Version

from tuner.app.cause import has_experts
from tuner.core.files import read_file
from tuner.core.records import Doubt
from tuner.core.setup.common import QUANTIZED
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.predict import releases
from tuner.program.planned import ProgramPlan
from tuner.program.program import Program

_LOCKS = ("uv.lock", "poetry.lock", "pdm.lock")
_PROJECT = "pyproject.toml"
_ENVIRONMENTS = (".venv", "venv")
_ROOT_MARKS = (".git", _PROJECT, *_LOCKS)
_MOST_BYTES = 8 << 20
"""The largest file of pins; lock files of large projects have a few MiB."""


@dataclass(frozen=True, slots=True)
class _Pins:
    """The `releases` that one file or environment pins: specifiers ("==4.45.2") by library."""

    path: Path
    releases: Mapping[str, str]


def pins_of(path: Path, libraries: Collection[str]) -> _Pins:
    """The pins of these libraries in a file, or in an environment's folder or interpreter.

    A file is a lock file, a pyproject.toml or requirements; a malformed one raises anything.
    """
    folder = _site_packages(path)
    if folder is not None:
        there = [d for d in metadata.distributions(path=[str(folder)]) if d.name and d.version]
        versions = {str(canonicalize_name(d.name)): f"=={d.version}" for d in there}
        return _Pins(path, {name: versions[name] for name in libraries if name in versions})
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
    return _Pins(path, releases)


def pins_near(program: Program, libraries: Collection[str]) -> list[_Pins]:
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


_SFT = "TRL SFTTrainer"

OLDEST = {"torch": "2.11", "bitsandbytes": "0.48", "transformers": "4.45", "trl": "0.12"}
"""The oldest releases that can be traced (but for TRL, the bounds of the extra `predict`)."""

_REPLACED = ("torch", "bitsandbytes")
"""Libraries of which a newer release stands for one that can't be traced: they change the kernels,
not what the other libraries allocate."""


Wanted = Mapping[str, tuple[str, _Pins]]
"""Specifiers by library, each with the file or environment nearest to the program."""


def pinned_notes(wanted: Wanted, plan: ProgramPlan) -> tuple[str, ...]:
    """The releases that the environment of a program pins otherwise than its prediction has them.

    The releases that differ come first, then the known breaks between them. Empty where every pin
    allows the release of the prediction.
    """
    stack = releases.predicted_stack()
    different = _different(wanted)
    if not different:
        return ()
    paths = " and ".join(dict.fromkeys(_shown(wanted[name][1].path) for name in different))
    theirs = ", ".join(f"{name}{pin} (predicted: {stack[name]})" for name, pin in different.items())
    breaks = releases.breaks_between(different, stack, set(_concerns(plan)))
    return f"{paths} pins {theirs}", *breaks


def with_pinned(wanted: Wanted) -> tuple[str, ...]:
    """The words before `tuner` of a command that predicts with the pinned releases.

    Empty where every pin allows the release of the prediction, or a pinned one can't be traced.
    """
    pinned = {library: specifier for library, (specifier, _) in sorted(wanted.items())}
    old = {
        library
        for library, oldest in OLDEST.items()
        if releases.is_before(pinned.get(library, ""), Version(oldest))
    }
    if not _different(wanted).keys() - old or old - {*_REPLACED}:
        return ()
    needed = [f"{name}{pin}" for name, pin in pinned.items() if name not in old]
    packages = (*needed, f"tuner-fit[predict]{_origin()}")
    return "uv", "run", "--no-project", *(w for name in packages for w in ("--with", name))


def _origin() -> str:
    """The folder that this tuner was installed from; empty for the package index."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = metadata.distribution("tuner-fit").read_text("direct_url.json")
        url = json.loads(installed or "{}").get("url", "")
        return f" @ {url}" if url.startswith("file:") else ""
    return ""


def pinned_doubts(wanted: Wanted) -> set[Doubt]:
    """The doubts about memory where the environment of a program pins other releases."""
    different = _different(wanted)
    if releases.is_before(different.get("torch", ""), Version("2")):
        return {Doubt.OLD_RELEASES}
    return {Doubt.RELEASES} if different else set()


def wanted_releases(program: Program) -> Wanted:
    """The releases that the environment of `program` pins. Lock files are large: ask once."""
    wanted: dict[str, tuple[str, _Pins]] = {}
    for pins in pins_near(program, releases.STACK):
        for library, specifier in pins.releases.items():
            wanted.setdefault(library, (specifier, pins))
    return wanted


def _different(wanted: Wanted) -> dict[str, str]:
    """The specifiers that don't allow the release of the prediction."""
    pinned = {library: specifier for library, (specifier, _) in wanted.items()}
    return {
        name: pinned[name] for name in releases.other_releases(pinned, releases.predicted_stack())
    }


def _shown(path: Path) -> str:
    """The path as it can be typed here."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _concerns(plan: ProgramPlan) -> Iterator[str]:
    configuration = plan.configuration
    if configuration["precision"] in QUANTIZED and has_experts(plan.model):
        yield releases.EXPERTS
    if plan.trainer == _SFT:
        yield releases.SFT
    if configuration["loss"] == "transformers":
        yield releases.LOGITS
    if Parallelism.of(configuration).is_sharded:
        yield releases.FSDP2
