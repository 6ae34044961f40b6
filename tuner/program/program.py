"""What is behind the words `train.py --epochs 3`, `config.yml`, `run.ipynb` or `torchrun ...`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuner.apply.place import Location
from tuner.apply.source import READERS, SourceFile, read_places
from tuner.errors import InputError, UnavailableError
from tuner.host import find_program

NOTEBOOK = ".ipynb"
_SETTINGS_FILES = tuple(suffix for suffix in READERS if suffix != ".py")

_PLACEHOLDER = "{file}"

_MOST_BYTES = 64 * 1024 * 1024
"""Of the program itself: a notebook keeps its pictures."""

_MOST_BYTES_OF_SETTINGS = 1024 * 1024
"""Of a file that an argument names: a larger one holds data."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """A program that takes all its settings from one file.

    `command` has "{file}" where the file goes. A file is for it when it has one of the keys of
    each group in `keys`, anywhere below its root.
    """

    name: str
    command: tuple[str, ...]
    keys: tuple[tuple[str, ...], ...]


# In this order: the keys of a later one may also be in the files of an earlier.
TRAINERS = (
    Trainer(
        "Axolotl",
        ("axolotl", "train", _PLACEHOLDER),
        (("base_model",), ("micro_batch_size", "sequence_len", "datasets")),
    ),
    Trainer(
        "LLaMA-Factory",
        ("llamafactory-cli", "train", _PLACEHOLDER),
        (("model_name_or_path",), ("finetuning_type", "cutoff_len", "stage")),
    ),
    Trainer(
        "torchtune",
        ("tune", "run", "lora_finetune_single_device", "--config", _PLACEHOLDER),
        (("_component_",), ("batch_size",)),
    ),
    Trainer(
        "TRL",
        ("trl", "sft", "--config", _PLACEHOLDER),
        (("model_name_or_path",), ("dataset_name", "datasets", "max_length", "packing")),
    ),
)


@dataclass(frozen=True, slots=True)
class Program:
    """A training program.

    `command` starts it. `files` are those that its words name and that settings can be read from,
    by the name in the word; of a notebook it is the notebook. `trainer` is the name of the tool
    whose file it is, "" for a program of its own.
    """

    command: tuple[str, ...]
    files: Mapping[str, SourceFile] = field(default_factory=dict)
    trainer: str = ""
    folder: Path = Path()
    """The folder that it runs in, from which relative files are meant."""

    @property
    def sources(self) -> list[SourceFile]:
        """The files, in the order of the words."""
        return list(self.files.values())


def read_program(words: Sequence[str], folder: Path = Path(), *, is_run: bool = True) -> Program:
    """The program that `words` start: a script with arguments, a tool's file, or a command.

    Relative files are those below `folder`. Raises `InputError` for what is none of them, and
    `UnavailableError` for a tool that is not installed unless it is only read (not `is_run`).
    """
    if not words:
        raise InputError(
            "no program was named",
            hint="name a script with its arguments, a file of Axolotl, LLaMA-Factory, TRL or "
            "torchtune, or after -- any command",
        )
    first = Path(words[0])
    if first.suffix in (".py", NOTEBOOK):
        return _script(folder, words)
    if first.suffix in _SETTINGS_FILES:
        return _tool(folder, words, is_run=is_run)
    if find_program(words[0]) is None:
        raise InputError(
            f"there is no program {words[0]!r}",
            hint="name a command on PATH, a .py or .ipynb file, or a trainer's .yaml or .json file",
        )
    return Program(tuple(words), _files_in(folder, words[1:]), folder=folder)


def _script(folder: Path, words: Sequence[str]) -> Program:
    files = {words[0]: _opened(folder / words[0]), **_files_in(folder, words[1:])}
    return Program((sys.executable, *words), files, folder=folder)


def _tool(folder: Path, words: Sequence[str], *, is_run: bool) -> Program:
    path = folder / words[0]
    source = _opened(path)
    trainer = trainer_of(source.places)
    if trainer is None:
        names = ", ".join(trainer.name for trainer in TRAINERS)
        raise InputError(
            f"{path} is not known as the file of a trainer ({names})",
            hint=f"name the command that reads it: tuner check --gpu GPU -- python train.py {path}",
        )
    command = [part.replace(_PLACEHOLDER, words[0]) for part in trainer.command]
    if is_run and find_program(command[0]) is None:
        raise UnavailableError(
            f"{path} is a file of {trainer.name}, and {command[0]!r} is not installed",
            hint="run tuner in the environment of the trainer, or name the command after --",
        )
    return Program((*command, *words[1:]), {words[0]: source}, trainer.name, folder)


def trainer_of(places: Sequence[Location]) -> Trainer | None:
    """The trainer whose file has these values; None for one that is not known."""
    keys = {str(step) for place in places for step in place.path}
    for trainer in TRAINERS:
        if all(any(key in keys for key in group) for group in trainer.keys):
            return trainer
    return None


def file_in(word: str) -> str:
    """The part of a word that may name a file: "a.yaml" of `--config=a.yaml`."""
    return word.partition("=")[2] if word.startswith("-") else word


def _files_in(folder: Path, words: Sequence[str]) -> dict[str, SourceFile]:
    """The files that words of a command name, if settings can be read from them."""
    files = {}
    for word in map(file_in, words):
        path = folder / word
        if path.suffix not in (*READERS, NOTEBOOK) or word in files:
            continue
        try:
            if path.is_file() and path.stat().st_size <= _MOST_BYTES_OF_SETTINGS:
                files[word] = _opened(path)
        except (OSError, ValueError, InputError):  # an argument that is no path; broken JSON
            continue
    return files


def _opened(path: Path) -> SourceFile:
    """The file at `path`, which is never written: it may be read-only."""
    if not path.is_file():
        why = "is a folder" if path.is_dir() else "is not there"
        raise InputError(f"the program {str(path)!r} {why}", hint="name a file that exists")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path}: larger than {_MOST_BYTES} bytes, too large for a program")
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return SourceFile(path, data, read_places(data, path))
