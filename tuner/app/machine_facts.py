"""The facts of a machine and its libraries, and the findings that `tuner doctor` prints."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from tuner.app.device import LocalGpu
from tuner.core.errors import DISTRIBUTION

Versions = Mapping[str, str | None]

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "ray", "optuna", "nvidia-ml-py")
"""Libraries that a trial, a prediction or a search needs."""

_PLACES = (
    Path(__file__).parents[1] / "constraints.txt",  # in an installed package
    Path(__file__).parents[2] / "constraints.txt",  # in the source tree
)


class Severity(enum.StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and what to do about it."""

    check: str
    level: Severity
    text: str
    fix: str = ""

    @classmethod
    def ok(cls, check: str, text: str) -> Finding:
        """A check that found nothing wrong."""
        return cls(check, Severity.OK, text)

    @classmethod
    def warning(cls, check: str, text: str, fix: str) -> Finding:
        """A setting or fault that slows training, or may stop it."""
        return cls(check, Severity.WARNING, text, fix)

    @classmethod
    def problem(cls, check: str, text: str, fix: str) -> Finding:
        """A fault that stops training."""
        return cls(check, Severity.PROBLEM, text, fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The facts of a machine. `probe` is the result of `tuner.app.probe`."""

    devices: tuple[LocalGpu, ...] = ()
    lost: tuple[str, ...] = ()
    """The driver's message about each GPU that it knows and cannot talk to."""
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    has_device_files: bool = False
    """True when the system has an NVIDIA device file."""
    probe: Mapping[str, Any] = field(default_factory=dict)
    versions: Versions = field(default_factory=dict)
    tested: Mapping[str, str] = field(default_factory=dict)
    least: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    flash_attn: bool = False
    cpus: int = 1
    host_total_bytes: int = 0
    host_available_bytes: int | None = None
    shared_bytes: int | None = None


def installed() -> dict[str, str | None]:
    """The installed version of each of `LIBRARIES`; None where it is not installed."""
    return {name: _version_of(name) for name in LIBRARIES}


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
        requirements = metadata.requires(DISTRIBUTION) or []
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


def _version_of(name: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
