"""Installed libraries against those that were tested together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "ray", "optuna", "nvidia-ml-py")
"""Those on which a trial, a prediction or a search depends."""

_PLACES = (
    Path(__file__).parents[1] / "constraints.txt",  # in an installed package
    Path(__file__).parents[2] / "constraints.txt",  # in the source tree
)


def installed() -> dict[str, str | None]:
    """The installed version of each of `LIBRARIES`; None where it is not installed."""
    return {name: _version(name) for name in LIBRARIES}


def tested() -> dict[str, str]:
    """The versions that were tested, by library; empty where the list was not installed."""
    for path in _PLACES:
        if path.is_file():
            lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
            pairs = (line.split("==") for line in lines if "==" in line)
            return {name.strip().lower(): version.strip() for name, version in pairs}
    return {}


def least() -> dict[str, str]:
    """The oldest version of each library with which this program works."""
    try:
        requirements = metadata.requires("tuner") or []
    except metadata.PackageNotFoundError:
        return {}
    return dict(_bounds(requirements))


def is_older(version: str, other: str) -> bool:
    """True when `version` is older than `other`; "2.13.0a0" is as old as "2.13"."""
    return Version(Version(version).base_version) < Version(Version(other).base_version)


def differs(version: str, other: str) -> bool:
    """True when major or minor number differ: the third changes no results."""
    one, two = Version(version), Version(other)
    return (one.major, one.minor) != (two.major, two.minor)


def _bounds(requirements: list[str]) -> Iterator[tuple[str, str]]:
    for needed in map(Requirement, requirements):
        for bound in needed.specifier if needed.marker is None else ():
            if bound.operator == ">=":
                yield needed.name.lower(), bound.version


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


Versions = Mapping[str, str | None]
