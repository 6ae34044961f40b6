"""The recommended values into the user's own configuration files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.apply.assign import Assignment, assignments, unmapped
from tuner.apply.plan import EditPlan, FileEdit, make_plan
from tuner.apply.write import replace_files
from tuner.errors import InputError
from tuner.expressions import show
from tuner.program.changes import change
from tuner.program.names import set_at
from tuner.program.program import read_program
from tuner.program.settings import NAMES, Setting, find_settings
from tuner.records import Configuration
from tuner.results.best import BestTrial
from tuner.space import SearchSpace
from tuner.space.command import Command


@dataclass(frozen=True, slots=True)
class Applying:
    """What is to be written; `rest` are texts of values that no file has a key for.

    `note` says what a reader should know of the change itself; empty where that is nothing.
    """

    plan: EditPlan
    rest: tuple[str, ...]
    note: str = ""

    @property
    def difference(self) -> str:
        """The changes of all files as a unified diff; empty where there are none."""
        return "".join(edit.diff() for edit in self.plan.files)

    def write(self) -> dict[Path, Path]:
        """Write the files; returns the dated copy of each as it was.

        Raises `InputError` where a file changed meanwhile, and `UnavailableError` where the disk
        refuses; in both cases every file is as it was.
        """
        return replace_files({edit.path: (edit.before, edit.after) for edit in self.plan.changed})


def applying(
    space: SearchSpace,
    best: BestTrial,
    files: Sequence[Path],
    *,
    targets: Sequence[str] = (),
    maps: Sequence[str] = (),
) -> Applying:
    """How the recommended values are written into `files`; nothing is written here.

    `targets` and `maps` say where values belong, as `--as` and `--map` do. Raises one
    `InputError` with everything that cannot be done safely.
    """
    if space.command is not None and space.command.is_program and not targets and not maps:
        return _into_program(space.command, best.configuration, files)
    wanted = assignments(space, best.configuration, targets=targets, maps=maps)
    plan = make_plan(files, wanted, set_at)
    rest = [_missing_text(assignment) for assignment in plan.missing]
    for name in unmapped(space, wanted, maps):
        rest.append(f"{name} = {show(best.configuration[name])}")
    return Applying(plan, tuple(rest), _batch_note(plan.before, best.configuration))


def _batch_note(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """That another number of samples makes an optimizer step; empty where that is not known."""
    old, new = _batch(before), _batch(after)
    if old is None or new is None or old == new:
        return ""
    return (
        f"the effective batch of a GPU changes from {old} to {new}: fewer or more steps make an "
        "epoch, and the learning rate that suited the one may not suit the other"
    )


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
            f"{', '.join(others)} is no file of the program that was searched",
            hint=f"its files are {', '.join(map(str, own))}",
        )
    settings = find_settings(program)
    values = {name: value for name, value in configuration.items() if name in NAMES}
    after = change(program, settings, values).after
    edits = []
    for path in files:
        before = program.files[own[path.resolve()]]
        changed = after.files[own[path.resolve()]]
        edits.append(FileEdit(path, before.data, changed.data, (), len(values)))
    rest = [
        f"{settings[name].name} = {show(value)}, in {settings[name].where}"
        for name, value in values.items()
        if name in settings and settings[name].value != value and not _is_in(settings[name], files)
    ]
    now = {name: setting.value for name, setting in settings.items()}
    note = _batch_note(now, {**now, **values})
    return Applying(EditPlan(tuple(edits), ()), tuple(rest), note)


def _is_in(setting: Setting, files: Sequence[Path]) -> bool:
    source = setting.source
    return source is not None and source.path.resolve() in {path.resolve() for path in files}


def _missing_text(assignment: Assignment) -> str:
    stage = f" in stage {assignment.stage}" if assignment.stage else ""
    knob = assignment.expression
    name = knob if knob.isidentifier() else str(assignment.key).lstrip(".")
    return f"{name} = {show(assignment.value)}{stage}"
