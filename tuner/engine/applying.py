"""The recommended values into the user's own configuration files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.apply.assign import Assignment, assignments, unmapped
from tuner.apply.plan import EditPlan, make_plan
from tuner.apply.write import replace_files
from tuner.expressions import show
from tuner.results.best import BestTrial
from tuner.space import SearchSpace


@dataclass(frozen=True, slots=True)
class Applying:
    """What is to be written; `rest` are texts of values that no file has a key for."""

    plan: EditPlan
    rest: tuple[str, ...]

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
    wanted = assignments(space, best.configuration, targets=targets, maps=maps)
    plan = make_plan(files, wanted)
    rest = [_missing_text(assignment) for assignment in plan.missing]
    for name in unmapped(space, wanted, maps):
        rest.append(f"{name} = {show(best.configuration[name])}")
    return Applying(plan, tuple(rest))


def _missing_text(assignment: Assignment) -> str:
    stage = f" in stage {assignment.stage}" if assignment.stage else ""
    knob = assignment.expression
    name = knob if knob.isidentifier() else str(assignment.key).lstrip(".")
    return f"{name} = {show(assignment.value)}{stage}"
