"""Checks a search that is to run elsewhere, and puts together what goes there.

Everything that can be wrong is found here, before anything is sent: the space, the conditions,
the GPU types, the limits. What goes along is data: the file of the space, and of a model of the
user's own its `config.json`; code only where the user names the folder it is in.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner.engine.custom_workload import require_lengths
from tuner.engine.device import AUTO, CPU
from tuner.engine.margin import parse_margin
from tuner.engine.measuring import Mode
from tuner.engine.plan import SearchOptions, make_plan
from tuner.engine.target import Target, check_conditions
from tuner.engine.targets import load_targets
from tuner.errors import InputError, TunerError
from tuner.gpus import types_named
from tuner.results.store import safe_name
from tuner.space import SearchSpace, pin

MODEL_FILE = "config.json"


def check_type(name: str) -> str:
    """`name`. Raises `InputError` for a GPU "type" that means the machine it is typed on."""
    if name.strip().lower() in (AUTO, CPU):
        raise InputError(
            f"--gpu {name} means this machine, but the trials run on another",
            hint="name the GPU type; `tuner gpus` lists them",
        )
    return name


@dataclasses.dataclass(frozen=True, slots=True)
class RequestedGpu:
    """A GPU type as it was named: what it may mean, of which the cluster offers one.

    `settled` says whether the name tells one type.
    """

    name: str
    targets: tuple[Target, ...]

    @property
    def settled(self) -> bool:
        """Whether the name tells one type."""
        return len(self.targets) == 1

    @property
    def label(self) -> str:
        """The type's id, or the name where the cluster settles it."""
        return self.targets[0].gpu.id if self.settled else self.name

    @property
    def choices_text(self) -> str:
        """What the name may mean, for people."""
        return " or ".join(target.gpu.id for target in self.targets)


def asked_for(
    space: str, names: Sequence[str], results: Path, **selected: Any
) -> list[RequestedGpu]:
    """What the names of GPU types mean; a name of several types may mean each of them.

    `selected` are arguments of `load_targets`. Raises `InputError` with everything that is wrong.
    """
    ids = {check_type(name): types_named(name) or (name,) for name in names}
    firsts = [found[0] for found in ids.values()]
    load_targets(space, firsts, results=results, **selected)  # all that is wrong, at once
    return [
        RequestedGpu(
            name, tuple(load_targets(space, [i], results=results, **selected)[0] for i in found)
        )
        for name, found in ids.items()
    ]


def check_asked(asked: Sequence[RequestedGpu], options: SearchOptions) -> None:
    """Raise the error of what the cluster would refuse, whichever type a name means there."""
    for one in asked:
        errors: list[TunerError] = []
        for target in one.targets:
            try:
                check_search([target], options)
            except TunerError as error:
                errors.append(error)
            else:
                break
        else:
            raise errors[-1]


def check_search(targets: Sequence[Target], options: SearchOptions) -> None:
    """Raise `InputError` for what the cluster would refuse. Writes nothing; imports torch."""
    for target in targets:
        if target.space.predictable:
            _check_predictable(target, options)
        else:
            _check_own_code(target, options)


def _check_predictable(target: Target, options: SearchOptions) -> None:
    if options.lengths == "data":
        require_lengths(target.space)
    if options.mode is not Mode.PREDICT:
        # What the cluster offers is for the cluster to say.
        options = dataclasses.replace(options, mode=Mode.PREDICT, memory_limit=None)
    make_plan(target, dataclasses.replace(options, address=None, study=None))


def _check_own_code(target: Target, options: SearchOptions) -> None:
    if options.mode is Mode.PREDICT:
        raise InputError(
            f"search space {target.space.name!r} runs your own code, which cannot be predicted: "
            "leave out --mode predict"
        )
    space = pin(target.space, options.settings) if options.settings else target.space
    check_conditions(dataclasses.replace(target, space=space), options.where)
    parse_margin(options.margin, target.gpu)
    space.require_configurations(options.where)


def new_id(space: str, gpus: Sequence[str]) -> str:
    """An id that says what the job is about, and is nobody else's."""
    types = gpus[0] if len(gpus) == 1 else f"{len(gpus)}gpus"
    return f"{safe_name(space).lstrip('_')[:60]}-{safe_name(types)[:30]}-{secrets.token_hex(4)}"


def put_together(space: SearchSpace, model: str | None, folder: Path) -> str:
    """Copy into `folder` what the search reads; returns how `--space` names it from there.

    Raises `InputError` for a space that needs more than data.
    """
    if not space.predictable:
        raise InputError(
            f"search space {space.name!r} runs your own code, which must be sent with the job",
            hint="name its folder with --working-dir; the space's file must be in it",
        )
    own_model = model or space.model
    if own_model is not None and Path(own_model).is_dir():
        _copy_model(Path(own_model), folder)
    assert space.path is not None  # it was read from a file
    name = space.path.name
    shutil.copyfile(space.path, folder / name)
    return f"./{name}"


def _copy_model(path: Path, folder: Path) -> None:
    if path.is_absolute() or ".." in path.parts:
        raise InputError(
            f"the model {str(path)!r} is a folder outside the current one, and the cluster does "
            "not have it",
            hint="name it by a path below the current folder",
        )
    if not (path / MODEL_FILE).is_file():
        raise InputError(f"the model {str(path)!r} is a folder without a {MODEL_FILE}")
    (folder / path).mkdir(parents=True)
    shutil.copyfile(path / MODEL_FILE, folder / path / MODEL_FILE)


def space_in(folder: Path, space_name: str, space: SearchSpace) -> str:
    """How `--space` names the space from within `folder`, which goes along whole.

    Raises `InputError` unless it is a folder, and the space's file, where one was named, in it.
    """
    if not folder.is_dir():
        raise InputError(f"--working-dir {str(folder)!r} is not a folder")
    assert space.path is not None
    inside = space.path.resolve()
    if inside.is_relative_to(folder.resolve()):
        return f"./{inside.relative_to(folder.resolve()).as_posix()}"
    if Path(space_name).name == space_name and not space_name.endswith((".yaml", ".yml")):
        return space_name  # one that comes with the program, there too
    raise InputError(
        f"the space's file {space_name!r} is not in --working-dir {str(folder)!r}",
        hint="only that folder goes to the cluster",
    )
