"""The entries of the zoo: one file a program, under programs/."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PROGRAMS = Path(__file__).with_name("programs")

Kind = Literal[
    "text",
    "preference",
    "reinforcement",
    "vision-language",
    "diffusion",
    "vision",
    "detection",
    "speech",
    "graph",
    "several-gpus",
    "pretraining",
    "control",
]
_NUMBER = re.compile(r"([a-z\d][^+]*?) ([\d.]+)")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Expected(_Table):
    """The answer that is right, and why: `arithmetic` is a sum of GiB, `why` its difference.

    Without arithmetic, `why` says what else makes the peak plausible.
    """

    ended: Literal["steps", "end", "oom", "error", "unsupported"] = "steps"
    arithmetic: str = ""
    why: str = ""

    @property
    def allocated_gib(self) -> float | None:
        """The sum of the arithmetic; None without one. Raises ValueError for words in it."""
        if not self.arithmetic:
            return None
        terms = [_NUMBER.fullmatch(term.strip()) for term in self.arithmetic.split(" + ")]
        if None in terms:
            raise ValueError(f"{self.arithmetic!r} is not like 'weights 2.5 + gradients 2.5'")
        return sum(float(term[2]) for term in terms if term)


class Entry(_Table):
    """One program.

    `{python}`, `{model}`, `{data}`, `{source}`, `{here}` (the folder of the entries) and `{bin}`
    (the commands of the environment) stand in `command` and in the values of `environment`.
    `model` and `data` name makers (models.py, data.py); `hub` are models of the catalogue that lie
    in the program's hub cache. `tiny` has what differs in tests, where models are tiny.
    `before` is a command that prepares, on the processor.
    """

    name: str
    title: str
    kind: Kind
    repository: str
    commit_or_version: str
    packages: tuple[str, ...] = ()
    command: tuple[str, ...]
    before: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    gpu: str
    gpus: int = 1
    all_ranks: bool = False
    timeout_s: float = 600
    model: str | None = None
    data: str | None = None
    hub: tuple[str, ...] = ()
    tiny: dict[str, Any] = Field(default_factory=dict)
    expected: Expected
    note: str = ""

    @property
    def is_repository(self) -> bool:
        """Whether its source is a repository, and not a package of the index."""
        return "/" in self.repository

    @property
    def needs_source(self) -> bool:
        """Whether something of its source is run, or read."""
        said = (*self.command, *self.before, *self.environment.values(), self.data or "")
        return any("{source}" in one for one in said)

    def shrunk(self) -> Entry:
        """The entry as tests run it."""
        return Entry(**{**self.model_dump(), **self.tiny})


def read(name: str) -> Entry:
    """The entry of a program. Raises `pydantic.ValidationError`, which names what is missing."""
    text = (PROGRAMS / f"{name}.toml").read_text(encoding="utf-8")
    return Entry(name=name, **tomllib.loads(text))


def names() -> list[str]:
    """All programs, in the order of their names."""
    return sorted(path.stem for path in PROGRAMS.glob("*.toml"))
