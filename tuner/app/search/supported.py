"""The part of a search space that can be predicted and run, and the user's own code."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuner.app.device import can_emulate, is_cpu
from tuner.app.measuring import Measuring, Predicting
from tuner.app.target import CannotRunError
from tuner.core.errors import InputError, Problem, UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.cost.speed.profile import DeviceProfile
from tuner.space import SearchSpace
from tuner.space.models.catalogue import Architecture, architecture
from tuner.trial.base import TrialJob


@dataclass(frozen=True, slots=True)
class SupportedSpace:
    """A search space without the configurations that the GPU cannot run at all.

    `reasons` counts the configurations left out for each reason; one may have several reasons.
    """

    space: SearchSpace
    supported: tuple[Configuration, ...]
    left_out: int
    reasons: Mapping[str, int] = field(default_factory=dict)


COMPILED = (
    "torch_compile, with which the speed is not predicted: only trials know it (--mode emulate)"
)
"""The reason why configurations are left out where nothing runs."""


def supported_part(
    space: SearchSpace, gpu: Gpu, where: tuple[str, ...], *, runs: bool = True
) -> SupportedSpace:
    """The part of `space` to search on `gpu`. Raises `InputError` when nothing is left.

    Trials of several GPUs with an unknown link rate are left out if other trials remain, and
    compiled configurations if no trial `runs`.
    """
    from tuner.cost.parallel import LINK, NETWORK, unknown_rate  # numpy

    space.require_configurations(where)
    model = architecture(space.predicted_model()) if space.predictable else None
    supported: list[Configuration] = []
    reasons: dict[str, int] = {}
    left_out = 0
    for configuration in space.configurations(where):
        # The needs of the user's own code are unknown.
        problems: dict[str, None] = {}
        if space.predictable:
            for values in [*space.stage_configurations(configuration).values()] or [configuration]:
                problems |= {p.message: None for p in _unsupported(values, gpu, model)}
        if not runs and configuration.get("torch_compile"):
            problems[COMPILED] = None
        if not problems:
            supported.append(configuration)
            continue
        left_out += 1
        for message in problems:
            reasons[message] = reasons.get(message, 0) + 1
    if not supported:
        raise CannotRunError(
            f"{gpu.name} can run no configuration of search space {space.name!r}",
            problems=[Problem(reason) for reason in reasons],
            hint=None if COMPILED in reasons else _hint(gpu, space),
        )
    predicted = supported
    if is_predicted(space, gpu):
        predicted = [c for c in supported if unknown_rate(gpu, Parallelism.of(c)) is None]
    if predicted and len(predicted) < len(supported):  # else the prediction's error helps
        lacking = LINK if gpu.link_bytes_per_s is None else NETWORK
        several = "GPUs" if lacking == LINK else "machines"
        reasons[
            f"trials of several {several}, whose time is unknown: no link rate is known for "
            f"{gpu.name}; add {lacking} to an entry `like: {gpu.id}` in your gpus.yaml"
        ] = len(supported) - len(predicted)
        left_out += len(supported) - len(predicted)
        supported = predicted
    return SupportedSpace(space, tuple(supported), left_out, reasons)


def require_supported(configuration: Configuration, gpu: Gpu) -> None:
    """Raise `InputError`, with all problems, if `gpu` cannot run the configuration."""
    problems = _unsupported(configuration, gpu, None)
    if problems:
        raise InputError(
            f"{gpu.name} cannot run this configuration",
            problems=[Problem(p.message) for p in problems],
            hint="set attention to sdpa"
            if all(problem.where == "attention" for problem in problems)
            else _hint(gpu, knobs=[problem.where or "" for problem in problems]),
        )


def _unsupported(
    configuration: Configuration, gpu: Gpu, model: Architecture | None
) -> list[Problem]:
    from tuner.predict.predict import check_supported  # numpy

    return check_supported(configuration, gpu, model=model)


_DTYPES = ("precision", "mixed_precision", "compute_dtype")


def _hint(gpu: Gpu, space: SearchSpace | None = None, *, knobs: Sequence[str] = _DTYPES[:2]) -> str:
    """A hint with `knobs`, those that are not supported, in fp16."""
    allowed = [p for p in ("fp32", "tf32", "fp16", "bf16", "int8") if p in gpu.flops]
    text = f"{gpu.id} computes in {', '.join(allowed)}"
    fixed = space is not None and "mixed_precision" in space.fixed
    if fixed and space is not None and str(space.fixed["mixed_precision"]) not in gpu.flops:
        return f"{text}: the space holds mixed_precision at {space.fixed['mixed_precision']}"
    example = " ".join(f"--set {name}=fp16" for name in _DTYPES if name in knobs)
    return f"{text}; for example {example}" if example else text


def has_predictions(space: SearchSpace, gpu: Gpu) -> bool:
    """True if a search of `space` starts from predictions."""
    return is_predicted(space, gpu) or has_program_prior(space, gpu)


def is_predicted(space: SearchSpace, gpu: Gpu) -> bool:
    """True if memory and speed of the space's configurations are predicted from traces."""
    return space.predictable and not is_cpu(gpu)


def has_program_prior(space: SearchSpace, gpu: Gpu) -> bool:
    """True if a few emulated runs of the space's program can predict all its configurations."""
    return space.command is not None and space.command.is_program and can_emulate(gpu)


def require_trials(space: SearchSpace, trials_on: Measuring | Predicting) -> None:
    """Raise `UnavailableError` if the space can only be measured and no trial can run."""
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
    """The job that all trials of `space` have in common."""
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
    """Raise `InputError` unless the distribution of the data's token lengths is known."""
    lengths = space.data.token_lengths
    if lengths is None or not lengths.points:
        known = "mean and maximum of the token lengths only" if lengths else "no token lengths"
        raise InputError(
            f"search space {space.name!r} states {known}, and --lengths data draws examples",
            hint="give data.token_lengths as quantiles or a histogram; `tuner data` reads a file",
        )


def model_version(space: SearchSpace, lengths: str | None = None) -> str:
    """The trained model or code as a version; trials with another version are not comparable.

    `lengths` is "data" if the trial draws lengths from the space's data. For the user's own code,
    the version covers the workload's file, not its imports.
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
    """The first folder to look for the user's code in: that of the space's file."""
    return space.path.parent.resolve() if space.path is not None else Path.cwd()


def _source_digest(space: SearchSpace) -> str:
    """12 hexadecimal digits of the hash of the workload's file; empty if it has no plain file."""
    module = Path(*space.workload.partition(":")[0].split("."))
    for folder in (_folder(space), *map(Path, sys.path)):
        for path in (folder / module.with_suffix(".py"), folder / module / "__init__.py"):
            if path.is_file():
                return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return ""
