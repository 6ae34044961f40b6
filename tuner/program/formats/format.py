"""What a format is: the settings of one tool, and how they become a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.program.formats.settings_reader import SettingsReader

Build = Callable[[SettingsReader, str | None], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Format:
    """One tool's settings. `suffix` is that of its files; `use` says what takes them.

    Where that depends on the settings, `use` is made of them.
    """

    build: Build
    suffix: str
    use: str | Callable[[Mapping[str, Any]], str]
    workloads: tuple[str, ...] = ()
    """The workloads that the tool can train; all when empty."""
