"""Installed libraries against those that were tested together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "ray", "optuna", "nvidia-ml-py")
"""Those on which a trial, a prediction or a search depends."""

_PLACES = (
    Path(__file__).parents[1] / "constraints.txt",  # in an installed package
    Path(__file__).parents[2] / "constraints.txt",  # in the source tree
)
_LEAST = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?>=([0-9.]+)")


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
    """Whether `version` comes before `other`, by their numbers ("2.9" before "2.13")."""
    return _numbers(version) < _numbers(other)


def differs(version: str, other: str) -> bool:
    """Whether major or minor number differ: the third changes no results."""
    return _numbers(version)[:2] != _numbers(other)[:2]


def _bounds(requirements: list[str]) -> Iterator[tuple[str, str]]:
    for text in requirements:
        match = _LEAST.match(text)
        if match and "extra ==" not in text:
            yield match.group(1).lower(), match.group(2)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(text) for text in re.findall(r"\d+", version.partition("+")[0]))


Versions = Mapping[str, str | None]
