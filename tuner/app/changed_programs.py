"""The training programs that a branch changes: changed files, and those that import or open one."""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tuner.app.changed_files import READ, Changes, Imports
from tuner.app.project import Project
from tuner.core.errors import InputError
from tuner.program.edit.source import PYTHON
from tuner.program.program import Program, read_program

_CALLS = (b"Trainer(", b".backward(")
"""Code of a training: the call of a trainer or of a backward pass."""

_TRAINS = re.compile(rb'(?m)^(?![ \t"]*(?:class\b|#)).*?(?:Trainer\(|\.backward\()')
"""A line with such a call, which is no comment and doesn't make a class of it."""

_MOST_UNCHANGED = 50
"""Programs that may read a changed file; more take longer to read than people wait."""

_TESTS = re.compile(r"(test_.*|.*_test|conftest)\.py")
"""Names of files with pytest's tests."""

NOT_TRAINING, A_TEST, EXCLUDED = "not a training program", "a test", "excluded"
UNTRACKED = "not tracked by git; to review it, git add it"

ReadProgram = Program | InputError
"""A program, or why it cannot be read."""


def changed_programs(
    changes: Changes, project: Project, root: Path, skipped: dict[str, str]
) -> dict[tuple[str, ...], ReadProgram]:
    """The programs to review, by their words; those named in `project`, else changed files."""
    if project.programs:
        named = [tuple(shlex.split(command)) for command in project.programs]
        all_read = {words: _named(words, root) for words in named}
        return {w: p for w, p in all_read.items() if changes.files & set(paths_of(p, root))}
    read: dict[tuple[str, ...], ReadProgram] = {}
    files = {path for path in changes.files if PurePosixPath(path).suffix in READ}
    covered: set[str] = set()
    entries, modules = _candidates(files, project, Imports(changes.root), skipped)
    for path in (*entries, *modules):
        if path in modules and path in covered:
            continue
        program = _read(root, path)
        if isinstance(program, Program) and not changes.files & set(paths_of(program, root)):
            continue
        if program is not None:
            read[path,] = program
            covered |= set(paths_of(program, root)) if isinstance(program, Program) else set()
        elif path in files:
            skipped[path] = NOT_TRAINING
    for path in covered & skipped.keys():  # it is part of a program
        del skipped[path]
    skipped |= dict.fromkeys(_untracked_programs(changes, project, root), UNTRACKED)
    return read


def _untracked_programs(changes: Changes, project: Project, root: Path) -> Iterator[str]:
    """The untracked files that start a training. JSON isn't read: programs write much of it."""
    for path in sorted(changes.untracked):
        suffix = PurePosixPath(path).suffix
        if suffix in PYTHON:
            is_training = bool(_TRAINS.search((changes.root / path).read_bytes()))
        else:
            is_training = suffix in READ and suffix != ".json" and _read(root, path) is not None
        if is_training and not _not_a_program(path, project):
            yield path


def _named(words: tuple[str, ...], root: Path) -> Program:
    try:
        return read_program(words, root, is_run=False)
    except InputError as error:
        raise InputError(
            f"programs: {shlex.join(words)}: {error.message}", hint=error.hint
        ) from error


def _candidates(
    files: set[str], project: Project, imports: Imports, skipped: dict[str, str]
) -> tuple[list[str], list[str]]:
    """The files that may be training programs and may read one of `files`, and modules among those.

    A module is imported by another of them, and doesn't start by itself.
    """

    @functools.cache
    def code(path: str) -> bytes:
        return (imports.root / path).read_bytes()

    @functools.cache
    def trains(path: str) -> bool:
        return any(call in code(path) for call in _CALLS) and bool(_TRAINS.search(code(path)))

    found = []
    for path in sorted(imports.importers(files)):
        is_there, is_code = (imports.root / path).is_file(), PurePosixPath(path).suffix in PYTHON
        why = _not_a_program(path, project)
        if not why and is_there and is_code and not any(map(trains, imports.reached_from(path))):
            why = NOT_TRAINING
        if is_there and not why:
            found.append(path)
        elif is_there and path in files:
            skipped[path] = why
    imported = {other for path in found for other in imports.of(path) - {path}}
    modules = [path for path in found if path in imported and b"__main__" not in code(path)]
    entries = [path for path in found if path not in modules]
    unchanged = [path for path in entries if path not in files]
    if len(unchanged) > _MOST_UNCHANGED:
        raise InputError(
            f"{len(unchanged)} programs may import or open what changed, such as {unchanged[0]}",
            hint='name those to review in [tool.tuner], such as programs = ["train.py"]',
        )
    return entries, [path for path in modules if path in files]


def _not_a_program(path: str, project: Project) -> str:
    if project.excludes(path):
        return EXCLUDED
    return A_TEST if _TESTS.fullmatch(PurePosixPath(path).name) else ""


def _read(root: Path, path: str) -> ReadProgram | None:
    """The program in a file of Python or of a trainer; None for any other file of settings."""
    try:
        program = read_program([path], root, is_run=False)
    except InputError as error:
        return error if PurePosixPath(path).suffix in PYTHON else None
    return program


def paths_of(program: Program, folder: Path) -> Iterator[str]:
    """The paths of the program's files below `folder`."""
    for source in program.sources:
        yield below(source.path, folder)


def below(path: Path, folder: Path) -> str:
    """The path below `folder`, with slashes."""
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
