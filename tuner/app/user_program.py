"""The program that files with settings belong to, as far as it is known."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.core.errors import InputError, UnavailableError, unknown
from tuner.core.files import read_file
from tuner.program.edit.source import PYTHON, SourceFile, read_places
from tuner.program.edit.write import MAX_BYTES
from tuner.program.names import Script
from tuner.program.program import Program, read_program
from tuner.program.trainer import trainer_of

WAYS = ("emulate", "read", "none")
"""How arrival is looked at: by a run, by reading files, or not at all."""


@dataclass(frozen=True, slots=True)
class UserProgram:
    """The program that the files belong to; None where it is not known.

    `may_run` is whether people named it or one of its files: what only imports such a file is
    read. `note` says what to do to have more looked at.
    """

    program: Program | None
    may_run: bool = False
    note: str = ""


def require_way(way: str) -> None:
    """Raise `InputError` for what is none of `WAYS`."""
    if way not in WAYS:
        raise unknown("way to check", way, WAYS)


def user_program(sources: Sequence[SourceFile], words: Sequence[str]) -> UserProgram:
    """The program that `words` start, or the one that `sources`, the files to change, are of."""
    if words:
        return _started(words, sources)
    scripts = [s for s in sources if s.path.suffix in PYTHON]
    main = [s for s in scripts if not any(_imports(o, s.path) for o in scripts if o is not s)]
    tools = [s for s in sources if s.path.suffix not in PYTHON and trainer_of(s.places)]
    if len(main) == 1:
        return _of_script(main[0], sources)
    if not scripts and len(tools) == 1:
        return _started([str(tools[0].path)], sources)
    names = ", ".join(str(source.path) for source in (main or sources))
    return UserProgram(None, note=f"which program uses {names} is not known: name it after --")


def _started(words: Sequence[str], sources: Sequence[SourceFile]) -> UserProgram:
    try:
        return UserProgram(_with_sources(read_program(words), sources), may_run=True)
    except UnavailableError as error:  # the tool is elsewhere; its file can be read all the same
        program = read_program(words, is_run=False)
        return UserProgram(_with_sources(program, sources), note=f"not run: {error.message}")


def _of_script(script: SourceFile, sources: Sequence[SourceFile]) -> UserProgram:
    """The script itself, or the only one beside it that imports it."""
    users = [
        path
        for path in sorted(script.path.parent.glob("*.py"))
        if path.name != script.path.name and _imports_file(path, script.path)
    ]
    if len(users) > 1:
        names = ", ".join(map(str, users))
        return UserProgram(None, note=f"{names} use {script.path}: name your program after --")
    if users:
        note = f"{users[0]} was read, not run: name it after -- to have it run"
        return UserProgram(_with_sources(read_program([str(users[0])]), sources), note=note)
    program = _with_sources(read_program([str(script.path)]), sources)
    if not _imports_libraries(script):
        return UserProgram(
            program, note=f"{script.path} imports nothing that trains: name your program after --"
        )
    return UserProgram(program, may_run=True)


def _with_sources(program: Program, sources: Sequence[SourceFile]) -> Program:
    """`program` with files that it reads or imports by itself."""
    own = {source.path.resolve() for source in program.sources}
    more = {str(s.path): s for s in sources if s.path.resolve() not in own}
    return dataclasses.replace(program, files={**program.files, **more})


def _imports_file(path: Path, module: Path) -> bool:
    try:
        data = read_file(path, MAX_BYTES)
        return _imports(SourceFile(path, data, read_places(data, path)), module)
    except (OSError, InputError):  # no program that could be read
        return False


def _imports(source: SourceFile, module: Path) -> bool:
    if source.path.suffix not in PYTHON:
        return False
    return any(name.rpartition(".")[2] == module.stem for name in _imported(source))


def _imported(source: SourceFile) -> Iterator[str]:
    for node in ast.walk(Script(source).tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (alias.name for alias in node.names if not node.module)


def _imports_libraries(source: SourceFile) -> bool:
    return any(name.partition(".")[0] not in sys.stdlib_module_names for name in _imported(source))
