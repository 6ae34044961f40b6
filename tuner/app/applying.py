"""The recommended values into the user's own configuration files."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.core.errors import InputError, Problem, UnavailableError
from tuner.core.expressions import show
from tuner.core.files import read_file
from tuner.core.records import Configuration, KnobValue
from tuner.program.changes import change
from tuner.program.edit.assign import Assignment, assignments, unmapped
from tuner.program.edit.place import Location
from tuner.program.edit.plan import EditPlan, FileEdit, Following, make_plan
from tuner.program.edit.source import (
    PYTHON,
    Edit,
    SourceFile,
    open_source,
    read_places,
    stale_comments,
)
from tuner.program.edit.write import MAX_BYTES, replace_files
from tuner.program.names import Script, set_at
from tuner.program.program import Program, read_program
from tuner.program.setting import NAMES, Setting
from tuner.program.settings import find_settings, scripts_of
from tuner.program.trainer import trainer_of
from tuner.program.training import named_models
from tuner.searches.best import BestTrial
from tuner.space import SearchSpace
from tuner.space.apply import Path as KeySteps
from tuner.space.command import Command
from tuner.space.models.same import same_architecture


@dataclass(frozen=True, slots=True)
class Applying:
    """The changes to files, the `rest` of the values without a key, and the program of `user`.

    `wanted` are the values of parameters that the files then have.
    """

    plan: EditPlan
    rest: tuple[str, ...]
    wanted: Mapping[str, KnobValue]
    user: UserProgram

    @property
    def difference(self) -> str:
        """The changes of all files as a unified diff; empty where there are none."""
        return "".join(edit.diff() for edit in self.plan.files)

    def write(self) -> dict[Path, Path]:
        """Write the files; returns the dated copies of the old ones. See `replace_files`."""
        return replace_files({edit.path: (edit.before, edit.after) for edit in self.plan.changed})


def applying(
    space: SearchSpace,
    best: BestTrial,
    files: Sequence[Path],
    *,
    targets: Sequence[str] = (),
    maps: Sequence[str] = (),
    words: Sequence[str] = (),
    force_model: bool = False,
) -> Applying:
    """Plan to write the recommended values into `files`, without writing anything.

    `targets` and `maps` are those of `--as` and `--map`; `words` start the program. Raises one
    `InputError` with everything that cannot be done safely, such as a program that trains another
    model, unless `force_model`.
    """
    if space.command is not None and space.command.is_program and not targets and not maps:
        return _into_program(space.command, best.configuration, files)
    wanted = assignments(space, best.configuration, targets=targets, maps=maps)
    sources = _readable(files)
    user = user_program(sources, words)
    compared = [] if force_model else _compare_models(space, user, sources)
    plan = make_plan(files, wanted, following(user))
    rest = [_missing_text(assignment) for assignment in plan.missing]
    for name in unmapped(space, wanted, maps):
        rest.append(f"{name} = {show(best.configuration[name])}")
    values = _by_knob(space, plan.reached, best.configuration)
    notes = (*compared, *_batch_notes(plan.before, best.configuration), *plan.notes)
    return Applying(dataclasses.replace(plan, notes=notes), tuple(rest), values, user)


def _compare_models(
    space: SearchSpace, user: UserProgram, sources: Sequence[SourceFile]
) -> list[str]:
    """A note if the models could not be compared; `InputError` if the files train another one."""
    if space.model is None:
        return []
    named = named_models(user.program, sources)
    same = {one: same_architecture(one.name, space.model) for one in named}
    if True in same.values():
        return []
    others = [one for one, is_same in same.items() if is_same is False]
    if others and len(others) == len(named):
        problems = [Problem(f"trains {one.name}", one.where) for one in others]
        raise InputError(
            f"the recommendation is for {space.model}, and the files train another model",
            problems=problems,
            hint=f"search with --model {others[0].name}, or write it all the same: --force-model",
        )
    which = ", ".join(f"{one.where} names {one.name}" for one in named)
    why = f"{which}, which could not be looked up" if named else "the files name none"
    return [f"the model was not compared with {space.model}: {why}"]


def _readable(files: Sequence[Path]) -> list[SourceFile]:
    found = []
    for path in files:
        with contextlib.suppress(InputError):
            found.append(open_source(path))
    return found


def following(user: UserProgram) -> Following:
    """The places that the program takes values from; without one, those of a script alone."""
    if user.program is None:
        return Following(lambda source, place: set_at(Script(source), place))
    scripts = {script.source.path.resolve(): script for script in scripts_of(user.program)}
    settings = find_settings(user.program)

    def placed(source: SourceFile, place: Location) -> Location | None:
        script = scripts.get(source.path.resolve())
        return set_at(script or Script(source), place)

    def used(source: SourceFile) -> set[KeySteps]:
        return {
            setting.location.path
            for setting in settings.values()
            if setting.source is not None
            and setting.location is not None
            and setting.problem is None
            and setting.source.path.resolve() == source.path.resolve()
        }

    return Following(placed, used)


def _by_knob(
    space: SearchSpace, reached: Sequence[Assignment], configuration: Configuration
) -> dict[str, KnobValue]:
    found: dict[str, KnobValue] = {}
    for assignment in reached:
        names = space.condition(assignment.expression).names
        if assignment.stage is None and len(names) == 1:
            [name] = names
            found[name] = configuration[name]
    return found


def _batch_notes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """A note if another number of samples makes an optimizer step."""
    old, new = _batch(before), _batch(after)
    if old is None or new is None or old == new:
        return []
    return [
        f"the effective batch of a GPU changes from {old} to {new}: fewer or more steps make an "
        "epoch, and the learning rate that suited the one may not suit the other"
    ]


def _batch(values: Mapping[str, object]) -> int | None:
    size, rounds = values.get("micro_batch"), values.get("grad_accum")
    return size * rounds if isinstance(size, int) and isinstance(rounds, int) else None


def _into_program(
    command: Command, configuration: Configuration, files: Sequence[Path]
) -> Applying:
    """The values into the settings of the program that was searched, where it takes them from."""
    program = read_program(command.argv, Path(command.cwd))
    own = {source.path.resolve(): word for word, source in program.files.items()}
    others = [str(path) for path in files if path.resolve() not in own]
    if others:
        raise InputError(
            f"{', '.join(others)} is not a file of the searched program",
            hint=f"its files are {', '.join(map(str, own))}",
        )
    settings = find_settings(program)
    values = {name: value for name, value in configuration.items() if name in NAMES}
    after = change(program, settings, values).after
    edits, notes = [], list[str]()
    for path in files:
        before = program.files[own[path.resolve()]]
        changed = after.files[own[path.resolve()]]
        edits.append(FileEdit(path, before.data, changed.data, (), len(values)))
        replaced = [
            Edit(setting.location, values[knob], "")
            for knob, setting in settings.items()
            if knob in values
            and setting.source is before
            and setting.location is not None
            and setting.value != values[knob]
        ]
        notes += stale_comments(before, replaced)
    elsewhere = {
        name: settings[name]
        for name, value in values.items()
        if name in settings and settings[name].value != value and not _is_in(settings[name], files)
    }
    rest = [f"{s.name} = {show(values[name])}, in {s.where}" for name, s in elsewhere.items()]
    inside = {name: value for name, value in values.items() if name not in elsewhere}
    now = {name: setting.value for name, setting in settings.items()}
    notes = [*_batch_notes(now, {**now, **values}), *notes]
    plan = EditPlan(tuple(edits), (), notes=tuple(notes))
    return Applying(plan, tuple(rest), inside, UserProgram(program, may_run=True))


def _is_in(setting: Setting, files: Sequence[Path]) -> bool:
    source = setting.source
    return source is not None and source.path.resolve() in {path.resolve() for path in files}


def _missing_text(assignment: Assignment) -> str:
    stage = f" in stage {assignment.stage}" if assignment.stage else ""
    knob = assignment.expression
    name = knob if knob.isidentifier() else str(assignment.key).lstrip(".")
    return f"{name} = {show(assignment.value)}{stage}"


WAYS = ("emulate", "read", "none")
"""Ways to check that values take effect: by a run, by reading files, or not at all."""


@dataclass(frozen=True, slots=True)
class UserProgram:
    """The program that the files belong to; None if it is unknown.

    It `may_run` if the user named it or one of its files. `note` says how to have more checked.
    """

    program: Program | None
    may_run: bool = False
    note: str = ""


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
