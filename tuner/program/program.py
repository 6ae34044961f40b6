"""The program behind words such as `train.py --epochs 3`, `config.yml` or `torchrun ...`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path

from tuner.core.environment import this_python
from tuner.core.errors import InputError, UnavailableError, nearest
from tuner.core.files import read_file
from tuner.core.host import find_program
from tuner.program.arguments import (
    Argument,
    assignments_of,
    file_in,
    values_of_files,
    values_of_words,
)
from tuner.program.edit.source import PYTHON, SETTINGS_FILES, WORDS, SourceFile, checked, opened
from tuner.program.shell import SUFFIX, is_shell, run_shell
from tuner.program.trainer import FILE, trainer_named, trainer_of, trainers

_MOST_BYTES = 64 * 1024 * 1024
"""The largest program: a notebook keeps its pictures."""

_MODULE = ("-m", "--module")

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")

ONLY_BELOW = "TUNER_ONLY_BELOW"
"""The variable with the folder, without links, outside of which no program runs or is read."""


@dataclass(frozen=True, slots=True)
class Program:
    """A training program that `command` starts.

    `files` are those with settings that words name, by the word; `whole` of the settings adds
    those that its code reads, by path. `trainer` is the tool whose file it is, "" for a script.
    """

    command: tuple[str, ...]
    files: Mapping[str, SourceFile] = field(default_factory=dict)
    trainer: str = ""
    folder: Path = Path()
    """The folder that it runs in, from which relative files are meant."""
    main: str = ""
    """The word of the script that is run, "" where it is not known."""
    mentioned: frozenset[str] = frozenset()
    """The files that only code of the program opens or imports."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables that a shell script sets before it starts the program."""
    shell: str = ""
    """The word of the shell script that is run, "" where none is."""
    started_by: str = ""
    """The shell script that starts it."""

    @property
    def typed(self) -> tuple[str, ...]:
        """The words that a person types: a script without this Python before it."""
        return self.command[1:] if self.command[:1] == (this_python(),) else self.command

    @property
    def sources(self) -> list[SourceFile]:
        """The files, in the order of the words."""
        return list(self.files.values())

    @property
    def is_module(self) -> bool:
        """True if the script is named as a module, as in `python -m package.train`."""
        return self.main != "" and Path(self.main).suffix not in PYTHON


def read_program(words: Sequence[str], folder: Path = Path(), *, is_run: bool = True) -> Program:
    """The program that `words` start in `folder`: a script, a tool's file, or a command.

    Raises `InputError` for anything else, and `UnavailableError` for a missing tool if `is_run`, or
    for a program outside of `ONLY_BELOW`.
    """
    program = _program_of(words, folder, is_run=is_run)
    below = os.environ.get(ONLY_BELOW)
    for word in filter(None, (program.main, program.shell)):
        path = program.files[word].path.resolve()
        if below and not path.is_relative_to(below):
            raise UnavailableError(
                f"{path} isn't below {below}, where the MCP server was started",
                hint="no line of it runs; start `tuner mcp` in a folder that holds the program",
            )
    return program


def _program_of(words: Sequence[str], folder: Path, *, is_run: bool) -> Program:
    if not words:
        raise InputError(
            "no program was named",
            hint="name a script with its arguments, a file of Axolotl, LLaMA-Factory, TRL or "
            "torchtune, or after -- any command",
        )
    rest = list(words[words[0] == "env" :])
    assigned = list(takewhile(_ASSIGNMENT.match, rest))
    given, rest = dict(each.split("=", 1) for each in assigned), rest[len(assigned) :]
    if given and rest:
        inner = _program_of(rest, folder, is_run=is_run)
        command = ("env", *words[words[0] == "env" : -len(rest)], *inner.command)
        return replace(inner, command=command, environment=given)
    first = Path(words[0])
    if is_shell(words):
        command = ("bash", *words) if first.suffix == SUFFIX else tuple(words)
        path = folder / command[1]
        script = SourceFile(path, _read(path))
        files = {command[1]: script, **_files_in(folder, command[2:])}
        return Program(command, files, folder=folder, shell=command[1])
    if first.suffix in PYTHON:
        files = {words[0]: _opened(folder / words[0]), **_files_in(folder, words[1:])}
        return _with_main(Program((this_python(), *words), files, folder=folder))
    if first.suffix in SETTINGS_FILES:
        return _tool(folder, words, is_run=is_run)
    trainer = next((t.name for t in trainers() if _words_of(words, t.name)), "")
    program = _with_main(Program(tuple(words), _files_in(folder, words[1:]), trainer, folder))
    if find_program(words[0]) is None and not program.main and not trainer:
        raise _no_program(folder / words[0])
    if is_run and find_program(words[0]) is None:
        text, hint = f"{words[0]!r} is not installed", "run tuner in the environment that has it"
        raise UnavailableError(text, hint=hint)
    return program


def starts_of(program: Program) -> list[Program]:
    """The programs that a shell script or a tool's command starts; of any other, itself.

    Raises `InputError` for a script that starts none.
    """
    tool = trainer_named(program.trainer)
    if tool and tool.script and not program.main:
        return [tool.script(program)]
    if not program.shell:
        return [program]
    text = program.files[program.shell].data.decode("utf-8")
    words = program.command[program.command.index(program.shell) - 1 :]
    starts = run_shell(words, program.folder, text, environment=program.environment)
    known = {source.path.resolve(): source for source in program.sources}
    found = []
    for start in starts:
        try:
            one = read_program(start.words, start.folder, is_run=False)
        except InputError:  # `python -c`, or a tool that trains nothing
            continue
        files = dict(one.files)
        for word, source in one.files.items():
            other = known.get(source.path.resolve(), source)
            files[word] = replace(source, data=other.data)
        for path, said in start.files.items():
            named = (
                w for w in map(file_in, start.words) if (start.folder / w).resolve() == Path(path)
            )
            files[next(named, path)] = SourceFile(Path(path), said.encode())
        own = {source.path.resolve() for source in files.values()}
        files |= {word: s for word, s in program.files.items() if s.path.resolve() not in own}
        environment = {**program.environment, **start.environment, **one.environment}
        one = replace(one, files=files, environment=environment, started_by=program.shell)
        one = one if one.main else _with_main(one)
        found += starts_of(one)
    return found


def beside(program: Program, model: str | None) -> str | None:
    """A model's folder is meant from the folder that the program runs in, as a path."""
    if model is None:
        return None
    folder = program.folder / model
    # Without a separator it would be a model of the catalogue, which may have the same name.
    return os.path.join(os.curdir, folder) if folder.is_dir() else model  # noqa: PTH118


def _no_program(path: Path) -> InputError:
    kinds = "a .py or .ipynb file, or a trainer's .yaml or .json file"
    # Unlike those of a `Path`, they are false for any text.
    if os.path.isdir(path):  # noqa: PTH112
        return InputError(f"{str(path)!r} is a folder, not a program", hint=f"name {kinds} in it")
    if os.path.isfile(path):  # noqa: PTH113
        return InputError(f"{str(path)!r} is not a program", hint=f"name {kinds}")
    text = f"there is no program {str(path)!r}"
    return InputError(text, hint=f"name a command on PATH, {kinds}{_near(path)}")


def _near(path: Path) -> str:
    """A question for a file beside `path` with nearly its name; "" without one."""
    close = None
    with contextlib.suppress(OSError):
        close = nearest(path.name, [other.name for other in path.parent.iterdir()])
    return f"; did you mean {str(path.parent / close)!r}?" if close else ""


def _with_main(program: Program) -> Program:
    """The program with its script, where a word names one."""
    files = dict(program.files)
    main = next((word for word, source in files.items() if source.path.suffix in PYTHON), "")
    behind = dropwhile(lambda word: word not in _MODULE, program.command)
    named = _module_in(program) if not main or main in map(file_in, behind) else None
    if named is not None:
        main, source = named
        files = {main: source, **files}
    if not main:
        return program
    data = files[main].data
    tools = (t.name for t in trainers() if t.file and t.file.script and t.file.script in data)
    return replace(program, files=files, main=main, trainer=next(tools, ""))


def _module_in(program: Program) -> tuple[str, SourceFile] | None:
    for before, word in pairwise(program.command):
        if before in _MODULE:
            place = program.folder.resolve().joinpath(*word.split("."))
            for path in (place / "__main__.py", place.with_suffix(".py"), place / "__init__.py"):
                source = opened(path)
                if source is not None:
                    return word, replace(source, path=Path(os.path.relpath(path)))
            return None
    return None


def _tool(folder: Path, words: Sequence[str], *, is_run: bool) -> Program:
    """The program for a trainer's file, which need not be installed to be read."""
    name, *others = words
    path = folder / name
    source = _opened(path)
    trainer = trainer_of(source.places)
    if trainer is None or trainer.file is None:
        names = ", ".join(trainer.name for trainer in trainers() if trainer.file)
        raise InputError(
            f"{path} is not known as the file of a trainer ({names})",
            hint=f"name the command that reads it after --, such as -- python train.py {path}",
        )
    command = [part.replace(FILE, name) for part in trainer.file.command]
    if is_run and find_program(command[0]) is None:
        raise UnavailableError(
            f"{path} is a file of {trainer.name}, and {command[0]!r} is not installed",
            hint="run tuner in the environment of the trainer, or name the command after --",
        )
    return Program((*command, *others), {name: source}, trainer.name, folder)


def tool_settings(program: Program) -> dict[str, Argument]:
    """The settings of a tool's program: its file's, and the words behind it, which count more."""
    place = tool_words(program)
    command = program.command
    start = place.stop if place else command.index(program.main) + 1 if program.main else 0
    words = command[start:]
    named = [program.files[name] for name in map(file_in, words) if name in program.files]
    data = [source for source in named if source.path.suffix not in PYTHON]
    values = {**values_of_files(data), **values_of_words(words)}
    tool = trainer_named(program.trainer)
    if tool and tool.file and tool.file.takes_assignments:
        values |= assignments_of(words)
    values.pop("config", None)
    return values


def tool_words(program: Program) -> slice | None:
    """The place of the words that start its tool: 2 to 4 in `uv run axolotl train config.yml`."""
    return _words_of(program.command, program.trainer)


def _words_of(words: Sequence[str], trainer: str) -> slice | None:
    file = tool.file if (tool := trainer_named(trainer)) else None
    starts = (file.command[:2], *file.starts) if file else ()
    names = tuple(Path(word).name for word in words)
    found = (
        slice(n, n + len(start))
        for n in range(len(names))
        for start in starts
        if names[n : n + len(start)] == start
    )
    return next(found, None)


def _files_in(folder: Path, words: Sequence[str]) -> dict[str, SourceFile]:
    files = {}
    for word in map(file_in, words):
        if Path(word).suffix in (*PYTHON, *SETTINGS_FILES, *WORDS):
            source = opened(folder / word)
            if source is not None:
                files[word] = source
    return files


def _opened(path: Path) -> SourceFile:
    """The file at `path`, which is never written: it may be read-only."""
    return checked(SourceFile(path, _read(path)))


def _read(path: Path) -> bytes:
    if not path.exists() or path.is_dir():
        why = "is a folder, not a program" if path.is_dir() else "file not found"
        raise InputError(f"{why}: {path}", hint=f"name a file that exists{_near(path)}")
    return read_file(path, _MOST_BYTES)
