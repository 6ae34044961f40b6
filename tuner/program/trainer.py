"""A trainer: how tuner recognises, reads and starts its programs, and writes its settings."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.core.errors import Problem
from tuner.core.records import KnobValue
from tuner.program import trainers as modules
from tuner.program.arguments import ProgramTraining
from tuner.program.edit.place import Location
from tuner.program.writing import Settings, SettingsReader

FILE = "{file}"
"""Stands for the settings file in the command of a trainer."""


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The file with all settings of a trainer, which `command` starts with it as `FILE`.

    It has one of the keys of each group in `keys`, at any depth.
    """

    command: tuple[str, ...]
    keys: tuple[tuple[str, ...], ...]
    starts: tuple[tuple[str, ...], ...] = ()
    """Words with which other commands of the trainer begin."""
    script: bytes = b""
    """A part of the scripts that take the file."""
    takes_assignments: bool = False
    """Words such as `batch_size=4` set keys of the file."""


@dataclass(slots=True)
class Planned:
    """A training as it is predicted; `sequences` are those in one example.

    `reading.STORED` and `reading.PEFT_DEFAULT` stand for choices of the model.
    """

    model: str | None
    knobs: dict[str, Any]
    sequences: int = 1
    packs_codes: bool = False
    """The trainer packs 4-bit codes into the dtype of the weights, which FSDP can shard."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Reads the trainings of one class or tool, which `read_training` names `trainer`.

    `versions` are those of the packages whose code `plan` was written from.
    """

    name: str
    trainer: str
    versions: Mapping[str, str]
    plan: Callable[[ProgramTraining], Planned]


MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that values of another kind than the trainer's raise in its reading."""


@dataclass(frozen=True, slots=True)
class Format:
    """The settings that `tuner export --format NAME` writes, in a file with this suffix.

    `use` names the command that takes the file, or makes that text from the settings.
    """

    name: str
    build: Callable[[SettingsReader, str | None], Settings]
    use: str | Callable[[Mapping[str, Any]], str]
    suffix: str = ".yaml"
    workloads: tuple[str, ...] = ("causal_lm",)
    """The workloads that the tool can train; all when empty."""


@dataclass(slots=True)
class Launch:
    """The launch of a program: `processes` on each of `machines`; None means one per GPU."""

    processes: int | None = 1
    machines: int = 1
    knobs: dict[str, KnobValue] = field(default_factory=dict)
    mixed_precision: str | None = None
    problems: list[Problem] = field(default_factory=list)
    starts_ranks: bool = True
    """False for a command that starts one process only."""

    def on(self, gpus: int | None) -> int:
        """The number of ranks on machines with `gpus` each; problems are noted."""
        ranks = self.processes or gpus or 1
        if gpus is not None and not self.starts_ranks and gpus > 1:
            text = (
                f"starts one process on {gpus} GPUs, where a trainer uses DataParallel, which is "
                f"not predicted: start it with torchrun --nproc-per-node {gpus}"
            )
            self.problems.append(Problem(text, "the command"))
        elif gpus is not None and gpus != ranks:
            text = f"starts {ranks} processes, and --gpus is {gpus}: both have to be the same"
            self.problems.append(Problem(text, "the command"))
        return ranks * self.machines

    def whole(self, where: str, text: str) -> int | None:
        """The number that `text` says; anything else is a problem."""
        if text.isascii() and text.isdigit() and int(text) > 0:
            return int(text)
        self.problems.append(Problem(f"is {text!r}, and a number of processes is wanted", where))
        return None

    def set_machines(self, where: str, text: str) -> None:
        """Set the number of machines from a launcher's word for it."""
        if text not in ("1", "-1"):
            self.machines = self.whole(where, text) or 1


@dataclass(frozen=True, slots=True)
class Trainer:
    """One trainer, every part of it optional; `launch` and `script` get the program.

    `script` makes the program that the trainer's command runs, if that is a Python script.
    """

    name: str
    file: SettingsFile | None = None
    readings: tuple[Reading, ...] = ()
    format: Format | None = None
    launch: Callable[[Any], Launch] | None = None
    script: Callable[[Any], Any] | None = None


@functools.cache
def trainers() -> tuple[Trainer, ...]:
    """The `TRAINER` of each module in `tuner.program.trainers`, in the order of their names."""
    names = sorted(found.name for found in pkgutil.iter_modules(modules.__path__))
    return tuple(importlib.import_module(f"{modules.__name__}.{name}").TRAINER for name in names)


def reading_of(trainer: str) -> Reading | None:
    """The reading of trainings of this class or tool; None if it can't be predicted."""
    return next((r for t in trainers() for r in t.readings if r.trainer == trainer), None)


def trainer_of(places: Sequence[Location]) -> Trainer | None:
    """The trainer whose settings file has these values; None for an unknown one."""
    found = {str(step) for place in places for step in place.path}
    files = ((trainer, trainer.file.keys) for trainer in trainers() if trainer.file is not None)
    return next((t for t, keys in files if all(found.intersection(group) for group in keys)), None)


def trainer_named(name: str) -> Trainer | None:
    """The trainer with a settings file that has this name."""
    return next((t for t in trainers() if t.file is not None and t.name == name), None)
