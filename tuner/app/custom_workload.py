"""Spaces whose code is the user's own: what a search or trial of them is given, and lacks."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from tuner.app.device import is_cpu
from tuner.app.measuring import Measuring, Predicting
from tuner.core.errors import InputError, UnavailableError
from tuner.core.gpu import Gpu
from tuner.cost.speed.profile import DeviceProfile
from tuner.emulator.toolchain import unavailable
from tuner.space import SearchSpace
from tuner.space.models.catalogue import architecture
from tuner.trial.base import TrialJob

GUIDED = "guided"


def has_predictions(space: SearchSpace, gpu: Gpu) -> bool:
    """Whether a search of `space` starts from predictions, and not from nothing."""
    return space.predictable or has_program_prior(space, gpu)


def has_program_prior(space: SearchSpace, gpu: Gpu) -> bool:
    """Whether a few emulated runs of the space's program say what all of it would take."""
    return space.command is not None and space.command.is_program and can_emulate(gpu)


def can_emulate(gpu: Gpu) -> bool:
    """Whether programs run here on an emulated device of this type; processors are not emulated."""
    return not is_cpu(gpu) and unavailable() is None


def require_trials(space: SearchSpace, trials_on: Measuring | Predicting) -> None:
    """Raise `UnavailableError` where the space can be measured only, and nothing measures."""
    if space.predictable or isinstance(trials_on, Measuring):
        return
    raise UnavailableError(
        f"search space {space.name!r} runs your own code, which can be measured but not predicted: "
        f"{trials_on.why}",
        hint="--gpu auto uses this machine's GPU, --gpu cpu its processor, --mode emulate an "
        "emulated GPU",
    )


def trial_job(
    space: SearchSpace, gpu: Gpu, margin_fraction: float | None, profile: DeviceProfile | None
) -> TrialJob:
    """What is the same for all trials of `space`."""
    own = not space.predictable
    return TrialJob(
        space.workload,
        space.model,
        gpu,
        margin_fraction,
        profile,
        data=space.data,
        command=space.command,
        code_path=str(_folder(space)) if own and space.command is None else None,
    )


def require_lengths(space: SearchSpace) -> None:
    """Raise `InputError` unless single examples of the data are known to have which lengths."""
    lengths = space.data.token_lengths
    if lengths is None or not lengths.points:
        known = "mean and maximum of the token lengths only" if lengths else "no token lengths"
        raise InputError(
            f"search space {space.name!r} states {known}, and --lengths data draws examples",
            hint="give data.token_lengths as quantiles or a histogram; `tuner data` reads a file",
        )


def model_version(space: SearchSpace, lengths: str | None = None) -> str:
    """What a trial trained, as a version: trials of something else say nothing of this.

    `lengths` is "data" where it trained on those of the space's data. Of code of the user's own
    it is the file that is named, not what that imports.
    """
    if space.command is not None:
        return f"command {space.command.digest}"
    parts = [] if space.predictable else [f"{space.workload} {_source_digest(space)}"]
    if space.model is not None:
        parts.append(f"{space.model} {architecture(space.model).digest}")
    if lengths == "data":
        digest = hashlib.sha256(repr(space.data).encode()).hexdigest()[:12]
        parts.append(f"on lengths {digest}")
    return " ".join(parts)


def _folder(space: SearchSpace) -> Path:
    """Where the user's code is looked for first: beside the space."""
    return space.path.parent.resolve() if space.path is not None else Path.cwd()


def _source_digest(space: SearchSpace) -> str:
    """12 hexadecimal digits of the workload's file; empty where it is no plain file."""
    module = Path(*space.workload.partition(":")[0].split("."))
    for folder in (_folder(space), *map(Path, sys.path)):
        for path in (folder / module.with_suffix(".py"), folder / module / "__init__.py"):
            if path.is_file():
                return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return ""
